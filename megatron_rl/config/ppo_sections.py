"""What surrounds the loss in a PPO-style run, as settings (`docs/ppo.md`)."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.sections import Count, Fraction, Positive, Section


class OverlongSection(Section):
    """What a response loses that is long (DAPO, arXiv 2503.14476, section 3.4)."""

    kind: Literal["soft", "hard"] = "soft"
    """`soft`: up to `penalty`, linearly over the last `buffer` tokens; `hard`: a response that was
    cut gets -`penalty`, whatever it says"""
    buffer: Count = 4096
    """tokens before `rollout.max_response_tokens` over which the soft penalty grows"""
    penalty: Positive = 1.0
    """the largest, in units of reward"""


class ShapingSection(Section):
    """From a verdict to the reward that is trained on; evaluations keep the verdict."""

    signed: bool = False
    """a verdict r becomes 2 r - 1: +1 for right, -1 for wrong"""
    overlong: OverlongSection | None = None
    """null: length costs nothing"""
    truncated: Literal["train", "mask"] = "train"
    """whether a response that was cut at the limit is learned from; `mask`: its reward counts in
    its group's baseline, its tokens nowhere"""


class DynamicSamplingSection(Section):
    """Groups whose verdicts are all equal teach nothing: others are generated in their place."""

    rounds: Annotated[int, Field(ge=0)] = 0
    """how often in a step, at most; 0: never"""


class ReuseUntilSection(Section):
    """Signals that end the reuse of a rollout batch; `trainer.epochs` is then the most."""

    acceptance: Fraction | None = None
    """stop where `gate/acceptance` of an update would be below this"""
    kl: Positive | None = None
    """stop where `ratio/kl_to_behavior` of an update would be above this"""
    head_surge: Positive | None = None
    """stop where the output layer's squared gradient norm grows by more than this many standard
    deviations above the mean growth (arXiv 2605.19425)"""
    window: Annotated[int, Field(ge=2)] = 16
    """updates over which `head_surge` takes mean and deviation"""


class OfflineSection(Section):
    """Rollouts that were generated elsewhere, trained on without an engine."""

    rollouts: str | None = None
    """a run directory, its `rollouts/`, or a parquet file; null: the engine generates"""
    behavior: str = "file"
    """where the log-probs of the policy that generated come from: `file`, or a model folder"""
