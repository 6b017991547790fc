"""When the run is saved and from where it continues."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config, ConfigError
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import (
    RankTimeoutError,
    gather_from_ranks,
    raised_together,
    sum_over_ranks,
)
from megatron_rl.interruption import Interruption, RunInterrupted
from megatron_rl.lag.buffer import GroupBuffer
from megatron_rl.runs.checkpoints import file_names, sum_files
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.group_file import read_about, read_groups, write_groups
from megatron_rl.runs.rows import evaluation_scores, read_metrics
from megatron_rl.trainer.faults import Faults
from megatron_rl.trainer.reuse import ReuseGuard
from megatron_rl.trainer.step_under_way import StepUnderWay

HELD = "held.parquet"  # in a checkpoint: generated, and not done with
UNDER_WAY = "under_way.pt"  # in a checkpoint inside of a step: what its updates have reported
REUSE = "reuse.json"  # what the end of reuse is judged by


@dataclass
class CheckpointKeeper:
    """Saves between two updates: a checkpoint is complete under its final name, or it is not there.

    Its name is the step that its last update belongs to. Besides the model and the optimizer it
    holds the groups of rollouts in the buffer, and of a step that is not recorded yet what its
    updates have reported. Its manifest counts the updates before it that were skipped in a row.
    The order of prompts and every sampling seed follow from (seed, step).
    """

    config: Config
    directory: RunDirectory
    console: Console
    rank: int
    wait_for_records: Callable[[], None]
    interruption: Interruption = field(default_factory=Interruption)
    buffer: GroupBuffer | None = None
    reuse: ReuseGuard | None = None
    faults: Faults | None = None
    done: int = 0  # steps that are finished and recorded
    under_way: StepUnderWay | None = None  # the one after them, once it has its rollout batch
    _generated: Mapping[str, float] = field(default_factory=dict)  # of what a killed run had kept
    _saved: tuple[int, int] = (0, 0)  # step and updates of the newest checkpoint
    _is_writing: bool = False  # Megatron is, whose errors may come up on one rank alone

    def restore(self, actor: MegatronActor) -> int:
        """Load the newest sound checkpoint; returns the number of finished steps, 0 for none.

        A step that it is inside of is `under_way` afterwards, and what a killed run had generated
        by the weights that were loaded is in the buffer.

        Rank 0 chooses; every rank reads a share of the files against the manifest, loads, and
        compares what it then holds. What any rank finds damaged is set aside with the reason, and
        the one before is taken. Raises ConfigError where none is left.
        """
        with raised_together(doing="removing what failed saves have left"):
            if self.rank == 0:
                self.directory.checkpoints.clean()
        set_aside: list[str] = []
        while (step := self._newest()) is not None:
            reason = self._load(actor, step)
            if reason is None:
                self._take_up(step)
                break
            with raised_together(doing="setting a damaged checkpoint aside"):
                if self.rank == 0:
                    aside = self.directory.checkpoints.set_aside(step, reason)
                    self.console.say(f"checkpoint of step {step} is damaged, now {aside}: {reason}")
            set_aside.append(f"step {step}: {reason}")
        if step is None and set_aside:
            raise ConfigError(
                f"{self.directory.path} has no sound checkpoint left, and a run does not begin "
                "again over its own results; put one back, or choose another run.name:\n  "
                + "\n  ".join(set_aside)
            )
        if self.under_way is None and actor is not None:
            self._take_generated(actor)
        return self.done

    def _take_up(self, step: int) -> None:
        """Go on from the checkpoint of `step`, which is loaded."""
        name, all_updates = self.directory.path.name, self.config.updates_per_step
        done = all_updates if self.under_way is None else self.under_way.updates.count
        self._saved = (step, done)
        # Saved before its evaluation, a step may have been recorded after it.
        rows = read_metrics(self.directory.path) if self.rank == 0 else []
        is_recorded = gather_from_ranks(any(row["step"] == step for row in rows))[0]
        if self.under_way is None or (done == all_updates and is_recorded):
            if self.under_way is not None and self.buffer is not None:
                made = self.under_way.updates.made(self.config.trainer.minibatches)
                self.buffer.release(step, made)
            self.done, self.under_way = step, None
            self.console.say(f"continuing {name} after step {step}")
        else:
            self.done = step - 1
            self.console.say(f"continuing {name} in step {step}, after {done} of its updates")

    def _take_generated(self, actor: MegatronActor) -> None:
        """Hold what was generated for the next step by the very weights that are loaded."""
        if self.buffer is None:
            return
        file = self.directory.generated.file(self.done + 1)
        if not gather_from_ranks(file.is_file())[0]:
            return
        problem, groups, about = None, [], {}
        try:
            groups, about = read_groups(file), read_about(file)
            if about["layout"] != actor.layout:
                problem = "another layout computed its log-probs"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
        if (reason := self._first(problem)) is not None:
            self.console.say(f"generating step {self.done + 1} again: {reason}")
            return
        self.console.say(f"taking the rollouts of step {self.done + 1} from {file.name}")
        self.buffer.hold(group for group in groups if group.slot not in self.buffer.groups)
        self._generated = about["metrics"]

    def _newest(self) -> int | None:
        """The newest checkpoint as rank 0 sees it: a file system may tell others later."""
        steps = self.directory.checkpoints.steps() if self.rank == 0 else []
        return gather_from_ranks(max(steps, default=None))[0]

    def _load(self, actor: MegatronActor, step: int) -> str | None:
        """Load a checkpoint; what is wrong with it, the same on every rank. Collective."""
        folders = self.directory.checkpoints
        problem = folders.problem(step, share=(self.rank, actor.topology.world_size))
        if (reason := self._first(problem)) is not None:
            return reason
        with raised_together(doing=f"reading the manifest of step {step}"):
            manifest = folders.manifest(step)
        actor.load(folders.folder(step) / "actor")
        with raised_together(doing=f"reading what step {step} has under way"):
            try:
                self._load_under_way(folders.folder(step), device=actor.topology.device)
            except (KeyError, TypeError, ValueError) as error:  # although the sums are right
                raise ConfigError(
                    f"{folders.folder(step)} is inside of a step, or holds rollouts, as another "
                    f"release of megatron_rl writes them ({error!r}); go on by that release, or "
                    "move the folder away to go on from the checkpoint before"
                ) from error
            if self.faults is not None:  # a checkpoint of an earlier release does not say
                self.faults.in_a_row = manifest.get("skipped_in_a_row", 0)
        saved, mine = manifest["digests"], actor.digest()
        stated = saved[self.rank] if self.rank < len(saved) else {}
        # Under another layout, or another release of Megatron, each rank holds other tensors.
        is_same = stated.get("layout") != mine["layout"] or mine == stated
        wrong = f"what was loaded has the sum {mine['sum']}, what was saved {stated.get('sum')}"
        return self._first(None if is_same else wrong)

    def _load_under_way(self, folder: Path, *, device: torch.device) -> None:
        """What a checkpoint holds besides the actor."""
        held, under_way, reuse = folder / HELD, folder / UNDER_WAY, folder / REUSE
        if self.buffer is not None:
            self.buffer.restore(read_groups(held) if held.is_file() else [])
        is_inside = under_way.is_file()
        self.under_way = StepUnderWay.load(under_way, device=device) if is_inside else None
        if self.reuse is not None:
            self.reuse.restore(json.loads(reuse.read_text()) if reuse.is_file() else [])

    def _first(self, problem: str | None) -> str | None:
        """The first rank's problem, with its rank; None if none has one."""
        problems = gather_from_ranks(problem)
        found = [f"rank {rank}: {one}" for rank, one in enumerate(problems) if one is not None]
        return found[0] if found else None

    def begin(self, new: StepUnderWay) -> StepUnderWay:
        """A step has its rollout batch: a new step, or the one that was resumed, with its batch."""
        if self.under_way is None:
            new.generated = new.generated or self._generated
            self.under_way = new
        else:
            assert self.under_way.step == new.step, f"step {self.under_way.step} is under way"
            assert new.batch is not None
            self.under_way.take(new.batch)
        self._generated = {}
        return self.under_way

    def finish(self, step: int) -> None:
        """Step `step` is recorded, and its groups are released."""
        self.done, self.under_way = step, None

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return self._saved[0]

    @property
    def _position(self) -> tuple[int, int]:
        """The step of the last update, and how many of its updates are done."""
        if self.under_way is None:
            return self.done, self.config.updates_per_step
        return self.under_way.step, self.under_way.updates.count

    def save_if_due(self, actor: MegatronActor, step: int) -> None:
        """Save every `trainer.checkpoint_every` steps and after the last one."""
        if step == self.config.trainer.steps:
            self.save(actor)
        elif step % self.config.trainer.checkpoint_every == 0:
            self._save_or_go_on(actor, step)

    def _save_or_go_on(self, actor: MegatronActor, step: int) -> None:
        """Save; where a disk is full or fails, say so: the last good checkpoint is still there.

        Collective. What other trouble there is, is raised.
        """
        try:
            self.save(actor)
        except (OSError, RuntimeError, FloatingPointError, CheckpointException) as error:
            # Only what every rank raises can be followed by a collective.
            if isinstance(error, RankTimeoutError) or (
                self._is_writing and not isinstance(error, CheckpointException)
            ):
                raise
            failures = getattr(error, "failures", {})  # of Megatron's, on the rank that knows them
            told = "; ".join(f"rank {rank}: {one[0]}" for rank, one in failures.items())
            is_disk = isinstance(error, OSError | CheckpointException)
            if not any(gather_from_ranks(is_disk)):
                raise
            with raised_together(doing="removing what a failed save has left"):
                if self.rank == 0:
                    self.directory.checkpoints.clean()
            what = f"step {self.saved} is what is saved" if self.saved else "nothing is saved yet"
            self.console.say(
                f"step {step} is not saved: {told or error}; training goes on, and {what}"
            )

    def _spared(self, steps: Sequence[int]) -> set[int]:
        """Of these saved steps those that are kept however old: milestones, and the best one."""
        settings = self.config.trainer
        spared = {step for step in steps if settings.milestones and step % settings.milestones == 0}
        if settings.keep_best:
            metric = None if settings.keep_best is True else settings.keep_best
            scores = evaluation_scores(self.directory.path, metric=metric)
            spared |= set(
                sorted(scores.keys() & set(steps), key=lambda step: (scores[step], step))[-1:]
            )
        return spared

    def end_if_interrupted(self, actor: MegatronActor) -> None:
        """`end` if any rank was asked to. Collective: one integer is exchanged."""
        self.interruption.hold()
        asked = int(self.interruption.received is not None)
        if sum_over_ranks(asked, doing="asking every rank whether to go on"):
            self.end(actor)

    def end(self, actor: MegatronActor) -> NoReturn:
        """Save what is not saved, and raise RunInterrupted. Collective."""
        step, updates = self._position
        if (self.done or self.under_way) and (step, updates) != self._saved and self._may_save:
            self.save(actor)
        with raised_together(doing="recording what was trained"):
            self.wait_for_records()
        where = f"in step {step}/{self.config.trainer.steps} after {updates} of its updates"
        if self.under_way is None:
            where = f"after step {step}/{self.config.trainer.steps}" if step else ""
        what = f"{where}, which is saved" if where else "before the first step"
        if where and not self._may_save and step != self.saved:
            what = (
                f"{where}; it goes on after step {self.saved}, the last checkpoint: between two "
                "the engine keeps what none holds (lag.in_flight)"
            )
        self.console.say(
            f"asked to end: stopping {what}; go on by\n"
            f"  megatron-rl train --config {self.directory.config_file} run.resume=auto"
        )
        self.interruption.settle()  # before any rank ends, for which the others are asked again
        raise RunInterrupted

    @property
    def _may_save(self) -> bool:
        """Whether saving now changes nothing for who goes on.

        Keys and values that an engine keeps are not saved, but let go of with every checkpoint
        that is due, in the run that goes on as in one that continues from there.
        """
        return self.config.lag.in_flight is None or not self.config.lag.keeps_cache

    def save(self, actor: MegatronActor) -> None:
        """Write to a hidden folder, then rename it: a kill in between leaves no half checkpoint.

        Raises FloatingPointError where weights are not finite, RuntimeError on the other ranks.
        """
        folders, (step, updates) = self.directory.checkpoints, self._position
        doing = f"saving the checkpoint of step {step}"
        state = None if self.under_way is None else self.under_way.gather()
        self._is_writing = False
        with raised_together(doing=doing):
            actor.check_weights()  # inside of a step, and where none was pushed, nobody has looked
        with raised_together(doing=doing):
            if self.rank == 0:
                folders.begin(step)
                if self.buffer is not None and (held := self.buffer.contents()):
                    write_groups(folders.partial(step) / HELD, held)
                if state is not None:
                    torch.save(state, folders.partial(step) / UNDER_WAY)
                if self.reuse is not None:
                    text = json.dumps(self.reuse.state())
                    (folders.partial(step) / REUSE).write_text(text)
        partial = folders.partial(step)
        self._is_writing = True
        actor.save(partial / "actor")
        self._is_writing = False
        digests = gather_from_ranks(actor.digest())
        with raised_together(doing=doing):  # every rank has written its part
            seen = file_names(partial)
        # A file system may list another node's file late: all that any rank sees counts.
        names = sorted({name for one in gather_from_ranks(seen) for name in one})
        with raised_together(doing=doing):
            share = sum_files(partial, names[self.rank :: actor.topology.world_size])
        sums = {name: one for part in gather_from_ranks(share) for name, one in part.items()}
        with raised_together(doing=doing):
            if self.rank == 0:
                # A run that continues from here would not write them again.
                self.wait_for_records()
                skipped = self.faults.in_a_row if self.faults is not None else 0
                folders.complete(step, sums=sums, digests=digests, skipped=skipped)
                folders.prune(keep=self.config.trainer.keep_checkpoints, spared=self._spared)
                self.directory.generated.forget(step)
        self._saved = (step, updates)
