"""When the run is saved and from where it continues."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from megatron_rl.runs.group_file import read_groups, write_groups
from megatron_rl.runs.rows import evaluation_scores

HELD = "held.parquet"  # in a checkpoint: generated, and not done with


@dataclass
class CheckpointKeeper:
    """Saves at step boundaries: a checkpoint is complete under its final name, or it is not there.

    Nothing but the model, the optimizer, what is held in the buffer and the number of finished
    steps needs saving: the order of prompts and every sampling seed follow from (seed, step).
    """

    config: Config
    directory: RunDirectory
    console: Console
    rank: int
    wait_for_records: Callable[[], None]
    interruption: Interruption = field(default_factory=Interruption)
    buffer: GroupBuffer | None = None
    _saved: int = 0  # the step of the newest checkpoint
    _is_writing: bool = False  # Megatron is, whose errors may come up on one rank alone

    def restore(self, actor: MegatronActor) -> int:
        """Load the newest sound checkpoint; returns the number of finished steps, 0 for none.

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
                self._saved = step
                self.console.say(f"continuing {self.directory.path.name} after step {step}")
                return step
            with raised_together(doing="setting a damaged checkpoint aside"):
                if self.rank == 0:
                    aside = self.directory.checkpoints.set_aside(step, reason)
                    self.console.say(f"checkpoint of step {step} is damaged, now {aside}: {reason}")
            set_aside.append(f"step {step}: {reason}")
        if set_aside:
            raise ConfigError(
                f"{self.directory.path} has no sound checkpoint left, and a run does not begin "
                "again over its own results; put one back, or choose another run.name:\n  "
                + "\n  ".join(set_aside)
            )
        return 0

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
        with raised_together(doing=f"reading the rollouts that are held after step {step}"):
            held = folders.folder(step) / HELD
            if self.buffer is not None:
                groups = read_groups(held) if held.is_file() else []
                self.buffer.groups = {group.slot: group for group in groups}
        saved, mine = manifest["digests"], actor.digest()
        stated = saved[self.rank] if self.rank < len(saved) else {}
        # Under another layout, or another release of Megatron, each rank holds other tensors.
        is_same = stated.get("layout") != mine["layout"] or mine == stated
        wrong = f"what was loaded has the sum {mine['sum']}, what was saved {stated.get('sum')}"
        return self._first(None if is_same else wrong)

    def _first(self, problem: str | None) -> str | None:
        """The first rank's problem, with its rank; None if none has one."""
        problems = gather_from_ranks(problem)
        found = [f"rank {rank}: {one}" for rank, one in enumerate(problems) if one is not None]
        return found[0] if found else None

    def save_if_due(self, actor: MegatronActor, step: int) -> None:
        """Save every `trainer.checkpoint_every` steps and after the last one."""
        if step == self.config.trainer.steps:
            self.save(actor, step)
        elif step % self.config.trainer.checkpoint_every == 0:
            self._save_or_go_on(actor, step)

    def _save_or_go_on(self, actor: MegatronActor, step: int) -> None:
        """Save; where a disk is full or fails, say so: the last good checkpoint is still there.

        Collective. What other trouble there is, is raised.
        """
        try:
            self.save(actor, step)
        except (OSError, RuntimeError, CheckpointException) as error:
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
            what = f"step {self._saved} is what is saved" if self._saved else "nothing is saved yet"
            self.console.say(
                f"step {step} is not saved: {told or error}; training goes on, and {what}"
            )

    def _spared(self, steps: Sequence[int]) -> set[int]:
        """Of these saved steps those that are kept however old: milestones, and the best one."""
        settings = self.config.trainer
        spared = {step for step in steps if settings.milestones and step % settings.milestones == 0}
        if settings.keep_best:
            scores = evaluation_scores(self.directory.path)
            spared |= set(sorted(scores.keys() & set(steps), key=lambda step: scores[step])[-1:])
        return spared

    def end_if_interrupted(self, actor: MegatronActor, done: int) -> None:
        """Save after step `done` and raise RunInterrupted if any rank was asked to end.

        Collective: one integer is exchanged.
        """
        self.interruption.hold()
        asked = int(self.interruption.received is not None)
        if not sum_over_ranks(asked, doing="asking every rank whether to go on"):
            return
        if done > self._saved:
            self.save(actor, done)
        what = f"after step {done}/{self.config.trainer.steps}, which is saved"
        self.console.say(
            f"asked to end: stopping {what if done else 'before the first step'}; go on by\n"
            f"  megatron-rl train --config {self.directory.config_file} run.resume=auto"
        )
        raise RunInterrupted

    def save(self, actor: MegatronActor, step: int) -> None:
        """Write to a hidden folder, then rename it: a kill in between leaves no half checkpoint."""
        folders = self.directory.checkpoints
        doing = f"saving the checkpoint of step {step}"
        self._is_writing = False
        with raised_together(doing=doing):
            if self.rank == 0:
                folders.begin(step)
                if self.buffer is not None and self.buffer.groups:
                    write_groups(folders.partial(step) / HELD, self.buffer.groups.values())
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
                folders.complete(step, sums=sums, digests=digests)
                folders.prune(keep=self.config.trainer.keep_checkpoints, spared=self._spared)
        self._saved = step
