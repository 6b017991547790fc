"""What the last stage reports of one micro-batch's loss."""

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.actor.packs import LocalPack
from megatron_rl.objectives.objective import ObjectiveResult
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.types import TokenBatch


@dataclass(frozen=True)
class LossReport:
    """Statistics of its tokens, and their log-probs."""

    statistics: Statistics
    logprobs: Tensor  # [1, t] the policy's


def report_loss(
    result: ObjectiveResult, logprobs: Tensor, *, batch: TokenBatch, pack: LocalPack, classes: int
) -> LossReport:
    """The report of a micro-batch; its tokens apart by class where they have any."""
    statistics = result.statistics
    if classes and batch.classes is not None:
        statistics.classes = result.by_class(classes=pack.shard(batch.classes), count=classes)
    return LossReport(statistics, logprobs.detach())
