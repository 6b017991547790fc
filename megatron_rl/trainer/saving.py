"""When the run is saved and from where it continues."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together, sum_over_ranks
from megatron_rl.interruption import Interruption, RunInterrupted
from megatron_rl.runs.directory import RunDirectory


@dataclass
class CheckpointKeeper:
    """Saves at step boundaries: a checkpoint is complete under its final name, or it is not there.

    Nothing but the model, the optimizer and the number of finished steps needs saving: the order
    of prompts and every sampling seed follow from (seed, step).
    """

    config: Config
    directory: RunDirectory
    console: Console
    rank: int
    wait_for_records: Callable[[], None]
    interruption: Interruption = field(default_factory=Interruption)
    _saved: int = 0  # the step of the newest checkpoint

    def restore(self, actor: MegatronActor) -> int:
        """Load the newest complete checkpoint; returns the number of finished steps, 0 for none."""
        with raised_together(doing="removing what failed saves have left"):
            if self.rank == 0:
                self.directory.remove_partial_checkpoints()
        found = self.directory.latest_checkpoint()
        if found is None:
            return 0
        step, folder = found
        actor.load(folder / "actor")
        self._saved = step
        self.console.say(f"continuing {self.directory.path.name} after step {step}")
        return step

    def save_if_due(self, actor: MegatronActor, step: int) -> None:
        """Save every `trainer.checkpoint_every` steps and after the last one."""
        last = step == self.config.trainer.steps
        if last or step % self.config.trainer.checkpoint_every == 0:
            self.save(actor, step)

    def end_if_interrupted(self, actor: MegatronActor, done: int) -> None:
        """Save after step `done` and raise RunInterrupted if any rank was asked to end.

        Collective: one integer is exchanged.
        """
        asked = int(self.interruption.received is not None)
        if not sum_over_ranks(asked, doing="asking every rank whether to go on"):
            return
        if done > self._saved:
            self.save(actor, done)
        what = f"after step {done}/{self.config.trainer.steps}, which is saved"
        self.console.say(
            f"asked to end: stopping {what if done else 'before the first step'}; the same command "
            "with run.resume=auto goes on from there"
        )
        raise RunInterrupted

    def save(self, actor: MegatronActor, step: int) -> None:
        """Write to a hidden folder, then rename it: a kill in between leaves no half checkpoint."""
        final = self.directory.checkpoint_folder(step)
        partial = final.with_name(f".{final.name}.partial")
        doing = f"saving the checkpoint of step {step}"
        with raised_together(doing=doing):
            if self.rank == 0:
                self._clear(partial, final)
        actor.save(partial / "actor")
        with raised_together(doing=doing):  # every rank has written its part
            pass
        with raised_together(doing=doing):
            if self.rank == 0:
                # A run that continues from here would not write them again.
                self.wait_for_records()
                self.directory.complete_checkpoint(partial, step)
                self.directory.prune_checkpoints(keep=self.config.trainer.keep_checkpoints)
        self._saved = step

    def _clear(self, partial: Path, final: Path) -> None:
        for leftover in (partial, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
