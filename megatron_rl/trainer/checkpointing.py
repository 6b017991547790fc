"""Saving checkpoints, resuming from them, and keeping some regardless of age."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.checkpoint_contents import CRITIC, FOLDER
from megatron_rl.actor.critic import Critic
from megatron_rl.config import Config, ConfigError
from megatron_rl.distributed.agreement import (
    gather_from_ranks,
    sum_over_ranks,
    sync_errors_across_ranks,
)
from megatron_rl.rollouts.schedule import GroupBuffer
from megatron_rl.runs.checkpoints import file_names, sum_files
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import evaluation_scores, last_step
from megatron_rl.runs.group_file import read_groups, read_metadata, write_groups
from megatron_rl.runtime.failures import RankTimeoutError, describe_space, is_full_disk
from megatron_rl.runtime.interruption import Interruption, RunInterrupted
from megatron_rl.telemetry.console import Console
from megatron_rl.trainer.route_files import read_routes, write_routes
from megatron_rl.trainer.step_progress import SkippedUpdates, StepProgress
from megatron_rl.types import PromptGroup

BUFFER_FILE = "buffer.parquet"  # in a checkpoint: groups that may still be trained
STEP_STATE_FILE = "step_state.pt"  # in a checkpoint inside a step: the results of its updates


@dataclass
class CheckpointKeeper:
    """Saves checkpoints between two updates; each appears under its final name once complete.

    The name is the step of the last update. Besides the model and the optimizer a checkpoint
    contains the rollout groups in the buffer and, for a step that is not recorded yet, the results
    of its updates. Its manifest counts the consecutive skipped updates before it.
    The order of prompts and every sampling seed follow from (seed, step).
    """

    config: Config
    directory: RunDirectory
    console: Console
    _: KW_ONLY
    rank: int
    wait_for_records: Callable[[], None]
    buffer: GroupBuffer
    faults: SkippedUpdates
    interruption: Interruption = field(default_factory=Interruption)
    critic: Critic | None = None
    done: int = 0  # steps that are finished and recorded
    step_progress: StepProgress | None = None  # the next one, once it has its rollout batch
    # metrics of rollouts that a killed run generated
    _generated: Mapping[str, float] = field(default_factory=dict)
    _saved: tuple[int, int] = (0, 0)  # step and updates of the newest checkpoint
    _is_writing: bool = False  # Megatron is; its errors may occur on a single rank

    def restore(self, actor: MegatronActor) -> None:
        """Load the newest intact checkpoint, if there is one; `done` steps are finished.

        If the checkpoint is inside a step, `step_progress` describes that step afterwards. Rollouts
        that a killed run generated with the loaded weights are in the buffer.

        Rank 0 chooses. Every rank checks a share of the files against the manifest, loads, and
        compares the digest of its tensors. A checkpoint that any rank finds damaged is quarantined
        with the reason, and the previous one is loaded. Raises ConfigError if none is left.
        """
        with sync_errors_across_ranks(doing="removing files of failed saves"):
            if self.rank == 0:
                self.directory.checkpoints.clean()
        quarantine: list[str] = []
        while (step := self._newest()) is not None:
            reason = self._load(actor, step)
            if reason is None:
                self._resume_from(step)
                break
            with sync_errors_across_ranks(doing="quarantining a damaged checkpoint"):
                if self.rank == 0:
                    moved = self.directory.checkpoints.quarantine(step, reason)
                    self.console.echo(
                        f"checkpoint of step {step} is damaged and was moved to {moved}: {reason}"
                    )
            quarantine.append(f"step {step}: {reason}")
        if step is None and quarantine:
            raise ConfigError(
                f"{self.directory.path} has no intact checkpoint left, and a run does not start "
                "again over its own results; restore one, or choose another run.name:\n  "
                + "\n  ".join(quarantine)
            )
        if self.step_progress is None:
            self._restore_rollouts(actor)
        repeated = gather_from_ranks(
            self.directory.describe_unsaved(self.done) if self.rank == 0 else None
        )[0]
        if repeated is not None:
            self.console.echo(repeated)

    def _resume_from(self, step: int) -> None:
        """Set the position of the run to the checkpoint of `step`, which is loaded."""
        name, all_updates = self.directory.path.name, self.config.updates_per_step
        done = self._all_updates if self.step_progress is None else self.step_progress.done
        self._saved = (step, done)
        # A step is saved before its evaluation and may have been recorded since.
        recorded = last_step(self.directory.path) if self.rank == 0 else None
        is_recorded = gather_from_ranks(recorded is not None and recorded >= step)[0]
        if self.step_progress is None or (
            self.step_progress.is_trained(all_updates) and is_recorded
        ):
            if self.step_progress is not None:
                made = self.step_progress.updates.made(self.config.trainer.minibatches)
                self.buffer.evict(step, made)
            self.finish(step)
            self.console.echo(f"continuing {name} after step {step}")
        else:
            self.done = step - 1
            self.console.echo(f"continuing {name} in step {step}, after update {done}")

    def _restore_rollouts(self, actor: MegatronActor) -> None:
        """Read rollouts that a killed run generated for the next step with the loaded weights."""
        if self.config.model.routing_replay == "engine":
            return  # the engine's routes are in no file: the step is generated again
        file = self.directory.generated.file(self.done + 1)
        if not gather_from_ranks(file.is_file())[0]:
            return
        problem, groups, about = None, [], {}
        try:
            groups, about = self._read_groups(file, actor), read_metadata(file)
            if about["layout"] != actor.layout:
                problem = "its log-probs were computed under another parallel layout"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
        if (reason := self._first(problem)) is not None:
            self.console.echo(f"generating step {self.done + 1} again: {reason}")
            return
        self.console.echo(f"reading the rollouts of step {self.done + 1} from {file.name}")
        self.buffer.insert(group for group in groups if group.slot not in self.buffer.groups)
        self._generated = about["metrics"]

    def _newest(self) -> int | None:
        """Step of the newest checkpoint that rank 0 sees: other nodes may see files later."""
        steps = self.directory.checkpoints.steps() if self.rank == 0 else []
        return gather_from_ranks(max(steps, default=None))[0]

    def _load(self, actor: MegatronActor, step: int) -> str | None:
        """Load a checkpoint; return its first problem, on every rank the same. Collective."""
        folders = self.directory.checkpoints
        problem = folders.problem(step, share=(self.rank, actor.topology.world_size))
        if (reason := self._first(problem)) is not None:
            return reason
        with sync_errors_across_ranks(doing=f"reading the manifest of step {step}"):
            manifest = folders.manifest(step)
        if self.critic is not None:
            self.critic.load(folders.folder(step) / CRITIC)
            self.critic.sleep()
        actor.load(folders.folder(step) / FOLDER)
        with sync_errors_across_ranks(doing=f"reading the progress of step {step}"):
            try:
                self._load_step_progress(folders.folder(step), actor)
            except (KeyError, TypeError, ValueError) as error:  # although the sums are right
                raise ConfigError(
                    f"{folders.folder(step)} has step progress or rollouts in the format of "
                    f"another release of megatron_rl ({error!r}); resume with that release, or "
                    "move the folder away to resume from the previous checkpoint"
                ) from error
            # Missing in checkpoints of earlier releases.
            self.faults.in_a_row = {
                "policy": manifest.get("skipped_in_a_row", 0),
                "critic": manifest.get("critic_skipped_in_a_row", 0),
            }
        saved, mine = manifest["digests"], self._digest(actor)
        stated = saved[self.rank] if self.rank < len(saved) else {}
        # Under another layout or release of Megatron each rank has other tensors.
        is_same = stated.get("layout") != mine["layout"] or mine == stated
        mismatch = f"the loaded state has the sum {mine['sum']}, the saved {stated.get('sum')}"
        return self._first(None if is_same else mismatch)

    def _load_step_progress(self, folder: Path, actor: MegatronActor) -> None:
        """Load the buffer and the step progress of a checkpoint."""
        held, step_progress = folder / BUFFER_FILE, folder / STEP_STATE_FILE
        self.buffer.restore(self._read_groups(held, actor) if held.is_file() else [])
        is_inside = step_progress.is_file()
        device = actor.topology.device
        self.step_progress = StepProgress.load(step_progress, device=device) if is_inside else None

    def _read_groups(self, file: Path, actor: MegatronActor) -> list[PromptGroup]:
        """Read groups whose arrays each rank has a share of; partial rollouts need all of them."""
        is_partial = self.config.lag.partial_rollouts is not None
        world_size = 1 if is_partial else actor.topology.world_size
        return read_groups(file, rank=self.rank, world_size=world_size)

    def _first(self, problem: str | None) -> str | None:
        """The first problem of any rank, with its rank; None if there is none. Collective."""
        problems = gather_from_ranks(problem)
        named = (f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
        return next(named, None)

    def begin(self, new: StepProgress, actor: MegatronActor) -> StepProgress:
        """Track a step that has its rollout batch; returns the progress of a resumed step.

        The batch of a resumed step has the routes of its behavior pass afterwards.
        """
        assert new.batch is not None
        if self.step_progress is None:
            new.generated = new.generated or self._generated
            self.step_progress = new
        else:
            assert self.step_progress.step == new.step, "another step is in progress"
            self.step_progress.attach(new.batch)
            read_routes(self.directory.checkpoints.folder(new.step), new.batch.packs, actor)
        self._generated = {}
        return self.step_progress

    def finish(self, step: int) -> None:
        """Mark step `step` as recorded and its groups as evicted."""
        is_saved = self._saved == self._position
        self.done, self.step_progress = step, None
        if is_saved:  # also after early stopping, with fewer updates than a step has
            self._saved = self._position

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return self._saved[0]

    @property
    def _position(self) -> tuple[int, int]:
        """Step of the last update, and the number of its updates that are done."""
        if self.step_progress is None:
            return self.done, self._all_updates
        return self.step_progress.step, self.step_progress.done

    @property
    def _all_updates(self) -> int:
        """Updates of a whole step, of critic and policy."""
        return self.config.updates_per_step * (1 if self.critic is None else 2)

    def _digest(self, actor: MegatronActor) -> dict[str, str]:
        """Return the digest of this rank's policy, and of its critic."""
        whole = actor.digest()
        return whole if self.critic is None else whole | {"critic": self.critic.digest()["sum"]}

    def save_if_due(self, actor: MegatronActor, step: int) -> None:
        """Save every `trainer.checkpoint_every` steps and after the last step."""
        if step == self.config.trainer.steps:
            self.save(actor)
        elif step % self.config.trainer.checkpoint_every == 0:
            self._save_or_continue(actor, step)

    def _save_or_continue(self, actor: MegatronActor, step: int) -> None:
        """Save; report a full or failing disk and continue, as the previous checkpoint is intact.

        Collective. All other errors are raised.
        """
        try:
            self.save(actor)
        except (OSError, RuntimeError, FloatingPointError, CheckpointException) as error:
            # A collective may follow only errors that every rank raises.
            if isinstance(error, RankTimeoutError) or (
                self._is_writing and not isinstance(error, CheckpointException)
            ):
                raise
            failures = getattr(error, "failures", {})  # by rank, on the rank where Megatron raised
            messages = "; ".join(f"rank {rank}: {one[0]}" for rank, one in failures.items())
            is_disk = isinstance(error, OSError | CheckpointException) or is_full_disk(error)
            if not any(gather_from_ranks(is_disk)):
                raise
            why = messages or str(error)
            with sync_errors_across_ranks(doing="removing files of a failed save"):
                if self.rank == 0:
                    why += f"; {describe_space(self.directory.path)}"
                    self.directory.checkpoints.clean()
                    self.directory.record_save(step, error=why)
            last = f"is of step {self.saved}" if self.saved else "does not exist yet"
            self.console.echo(
                f"step {step} is not saved: {why}; training continues, and the last checkpoint "
                f"{last}"
            )

    def stop_if_requested(self, actor: MegatronActor) -> None:
        """Call `checkpoint_and_exit` if any rank received a signal. Collective: one integer."""
        self.interruption.defer()
        is_requested = int(self.interruption.received is not None)
        if sum_over_ranks(is_requested, doing="exchanging stop requests between ranks"):
            self.checkpoint_and_exit(actor)

    def checkpoint_and_exit(self, actor: MegatronActor) -> NoReturn:
        """Save unless saved already, and raise RunInterrupted. Collective."""
        step, updates = self._position
        if (self.done or self.step_progress) and (step, updates) != self._saved and self._may_save:
            self.save(actor)
        with sync_errors_across_ranks(doing="recording the last step"):
            self.wait_for_records()
        at = f"step {step}, update {updates}" if self.step_progress else f"step {step}"
        if step == 0:
            message = "before the first step: nothing to save. Start again with"
        elif self._may_save or step == self.saved:
            message = f"checkpoint saved at {at}. Resume with"
        else:
            message = (
                f"stopped at {at}. The run resumes after step {self.saved}, the last checkpoint, "
                "because none contains the engine's KV cache (lag.partial_rollouts). Resume with"
            )
        received = self.interruption.received
        cause = "Stop requested" if received is None else f"Received {received.name}"
        self.console.echo(
            f"{cause}{':' if step else ''} {message}:\n"
            f"  megatron-rl train --config {self.directory.config_file} run.resume=auto"
        )
        # First, as an exiting rank causes signals to the others.
        self.interruption.ignore_further_signals()
        raise RunInterrupted

    @property
    def _may_save(self) -> bool:
        """True if a checkpoint at any moment leads to the results of an uninterrupted run.

        KV caches of unfinished responses are not saved. They are dropped at every regular
        checkpoint, in the run that continues as in one that resumes from it.
        """
        return self.config.lag.partial_rollouts is None or not self.config.lag.keeps_cache

    def save(self, actor: MegatronActor) -> None:
        """Write to a hidden folder, then rename it: a kill leaves no incomplete checkpoint.

        Raises FloatingPointError if weights are not finite, RuntimeError on the other ranks.
        """
        folders, (step, updates) = self.directory.checkpoints, self._position
        doing = f"saving the checkpoint of step {step}"
        state = None if self.step_progress is None else self.step_progress.gather()
        self._is_writing = False
        with sync_errors_across_ranks(doing=doing):
            if self.critic is not None:
                self.critic.check_weights()
            actor.check_weights()  # inside a step, or without a weight sync, they are unchecked
        with sync_errors_across_ranks(doing=doing):
            if self.rank == 0:
                folders.begin(step)
                if held := self.buffer.contents():
                    write_groups(folders.partial(step) / BUFFER_FILE, held)
                if state is not None:
                    torch.save(state, folders.partial(step) / STEP_STATE_FILE)

        folder = folders.partial(step)
        self._is_writing = True
        actor.save(folder / FOLDER)
        if self.critic is not None:
            self.critic.save(folder / CRITIC)
        self._is_writing = False
        digests = gather_from_ranks(self._digest(actor))
        with sync_errors_across_ranks(doing=doing):  # every rank has written its part
            if self.step_progress is not None:
                write_routes(folder, self.step_progress.remaining_packs(self.config), actor)
            seen = file_names(folder)
        # Files of other nodes may be listed late: use the union over ranks.
        names = sorted({name for one in gather_from_ranks(seen) for name in one})
        with sync_errors_across_ranks(doing=doing):
            share = sum_files(folder, names[self.rank :: actor.topology.world_size])
        sums = {name: one for part in gather_from_ranks(share) for name, one in part.items()}
        with sync_errors_across_ranks(doing=doing):
            if self.rank == 0:
                # A run that resumes from here would not write them again.
                self.wait_for_records()
                self.directory.flush()
                skipped = self.faults.in_a_row
                folders.complete(
                    step, sums=sums, digests=digests, skipped=skipped["policy"],
                    skipped_by_critic=skipped["critic"],
                )  # fmt: skip
                spared = partial(retained_steps, config=self.config, folder=self.directory.path)
                folders.prune(keep=self.config.trainer.keep_checkpoints, spared=spared)
                self.directory.record_save(step)
                self.directory.forget(step)
        self._saved = (step, updates)


def retained_steps(steps: Sequence[int], *, config: Config, folder: Path) -> set[int]:
    """Saved steps that are never pruned: multiples of `keep_every`, and the best step.

    folder: of the run.
    """
    settings = config.trainer
    spared = {step for step in steps if settings.keep_every and step % settings.keep_every == 0}
    if settings.keep_best:
        metric = None if settings.keep_best is True else settings.keep_best
        scores = evaluation_scores(folder, metric=metric)
        spared |= set(
            sorted(scores.keys() & set(steps), key=lambda step: (scores[step], step))[-1:]
        )
    return spared
