"""Sections for reward shaping, dynamic sampling, early stopping and offline data.

The guide is `docs/reward-shaping.md`.
"""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.paths import PathText
from megatron_rl.config.sections import Count, Fraction, Positive, Section


class OverlongSection(Section):
    """Length penalty (DAPO, arXiv 2503.14476, section 3.4)."""

    kind: Literal["soft", "hard"] = "soft"
    """`soft` subtracts a penalty that grows linearly to `penalty` over the last `buffer` tokens;
    `hard` gives every truncated response the reward -`penalty`."""
    buffer: Count = 4096
    """Number of tokens before `rollout.max_response_tokens` over which the soft penalty grows."""
    penalty: Positive = 1.0
    """Maximum penalty in units of reward."""


class ShapingSection(Section):
    """Reward shaping: from the verifier's reward to the training reward; not for evaluation."""

    signed: bool = False
    """Map each reward r to 2 r - 1: +1 for right, -1 for wrong. A response that was not graded
    (time limit, failed verifier, unparsable ground truth) keeps reward 0."""
    overlong: OverlongSection | None = None
    """Length penalty; null disables it."""
    truncated: Literal["train", "mask"] = "train"
    """Train on responses that were truncated at the length limit; `mask` counts their
    reward in the baseline of the group and excludes their tokens from the loss."""


class DynamicSamplingSection(Section):
    """Dynamic sampling: replace groups whose rewards are all equal, which have no gradient."""

    rounds: Annotated[int, Field(ge=0)] = 0
    """Maximum number of additional generation rounds per step; 0 disables dynamic sampling."""


class EarlyStoppingSection(Section):
    """Early stopping of reuse: end the epochs on a rollout batch before `trainer.epochs`."""

    acceptance: Fraction | None = None
    """Stop before an update whose `gate/acceptance` is below this; null disables the criterion."""
    kl: Positive | None = None
    """Stop before an update whose `ratio/kl_to_behavior` is above this; null disables the
    criterion."""


class OfflineSection(Section):
    """Training without an engine, on rollouts that were generated earlier or elsewhere."""

    rollouts: PathText | None = None
    """Run directory, its `rollouts/`, or a parquet file to train on; null generates rollouts with
    the engine."""
    behavior: PathText = "file"
    """Source of the behavior log-probs: `file` reads them from the rollouts, a model folder
    recomputes them with that model."""
