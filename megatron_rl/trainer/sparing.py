"""Checkpoints that are kept regardless of age."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.runs.files import evaluation_scores


def retained_steps(steps: Sequence[int], *, config: Config, folder: Path) -> set[int]:
    """Saved steps that are never pruned: those of `keep_every`, and the best one.

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
