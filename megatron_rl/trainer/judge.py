"""Judging responses: every rank verifies its share in its own worker processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.distributed.agreement import raised_together
from megatron_rl.distributed.topology import Topology
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import Prompt, Response, Rollout, Verdict


@dataclass
class Judge:
    """Turns responses into rollouts."""

    pool: VerifierPool
    topology: Topology

    def judge(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[Response],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Rollout]:
        """Rollouts in the order of `responses`, the same on every rank.

        `responses` holds the same number of responses for each prompt, prompt after prompt.
        Raises VerifierError on every rank when not one judgement came about.
        """
        samples = len(responses) // len(prompts)
        asked = [prompt for prompt in prompts for _ in range(samples)]
        rank, world_size = self.topology.rank, self.topology.world_size
        own = [
            Item(response.text, prompt.ground_truth, prompt.data_source, prompt.row)
            for prompt, response in list(zip(asked, responses, strict=True))[rank::world_size]
        ]
        with raised_together(doing="judging responses"):
            judged = self.pool.verify_all(own)
        verdicts = self._gather(judged)
        if all(verdict.reason == FAILED for verdict in verdicts):
            raise VerifierError(
                f"the verifier failed on each of {len(verdicts)} responses, so no reward means "
                "anything; the log has the first error of every rank"
            )
        if all(verdict.reason in (TIME_LIMIT, FAILED) for verdict in verdicts):
            raise VerifierError(
                f"none of {len(verdicts)} judgements ended within reward.time_limit_seconds="
                f"{self.pool.time_limit:g}, so no reward means anything; raise it, or lower "
                "reward.workers if they have to share cores"
            )
        if on_progress is not None:
            on_progress(len(verdicts), len(verdicts))
        return [
            Rollout(prompt=prompt, response=response, verdict=verdict)
            for prompt, response, verdict in zip(asked, responses, verdicts, strict=True)
        ]

    def _gather(self, own: list[Verdict]) -> list[Verdict]:
        world_size = self.topology.world_size
        if world_size == 1:
            return own
        shares: list[list[Verdict]] = [[] for _ in range(world_size)]
        dist.all_gather_object(shares, own)
        total = sum(len(share) for share in shares)
        return [shares[i % world_size][i // world_size] for i in range(total)]
