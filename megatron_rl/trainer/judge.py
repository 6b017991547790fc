"""Judging responses: every rank verifies in its own worker processes what it has generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.distributed.agreement import raised_together
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.unequal_work import UnequalWork
from megatron_rl.rewards.judging import Judging
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.process import START_SECONDS
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import Prompt, Response, Rollout, Verdict


@dataclass
class Judge:
    """Turns responses into rollouts; judges each from the moment it ends."""

    pool: VerifierPool
    topology: Topology
    on_progress: Callable[[], object] = lambda: None
    _judging: Judging | None = None
    _judged: int = 0

    def __post_init__(self) -> None:
        # No worker is silent for longer: it is new, or judges.
        patience = 2 * START_SECONDS + 2 * self.pool.time_limit
        self._work = UnequalWork("judging responses", patience=patience)

    def begin(self, prompts: Sequence[Prompt], *, samples: int) -> Callable[[int, Response], None]:
        """What to call with each response that ends on this rank, and its place among all.

        The place of sample s of prompt p is p * samples + s.
        """
        judging = self._judging = Judging(self.pool)

        def submit(place: int, response: Response) -> None:
            prompt = prompts[place // samples]
            item = Item(response.text, prompt.ground_truth, prompt.data_source, prompt.row)
            try:
                judging.submit(place, item)
            except VerifierError as error:  # what an earlier response has met: no need to go on
                raise VerifierError(f"judging responses: {error}") from error

        return submit

    def finish(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Rollout]:
        """Rollouts in the order of `responses`, the same on every rank; collective.

        `responses` holds the same number of responses for each prompt, prompt after prompt.
        Raises VerifierError on every rank when not one judgement came about.
        """
        assert self._judging is not None, "begin comes first"
        with raised_together(doing="judging responses"):
            self._work.begin()
            try:
                own = self._judging.finish(on_progress=self._tell)
            finally:
                self._work.finish(while_waiting=self.on_progress)
        verdicts = self._gather(own, count=len(responses))
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
        samples = len(responses) // len(prompts)
        asked = [prompt for prompt in prompts for _ in range(samples)]
        return [
            Rollout(prompt=prompt, response=response, verdict=verdict)
            for prompt, response, verdict in zip(asked, responses, verdicts, strict=True)
        ]

    def _tell(self, judged: int) -> None:
        if judged != self._judged:
            self._judged = judged
            self._work.advance(judged)
            self.on_progress()

    def _gather(self, own: dict[int, Verdict], *, count: int) -> list[Verdict]:
        shares = [own] * self.topology.world_size
        if self.topology.world_size > 1:
            dist.all_gather_object(shares, own)
        by_place = {place: verdict for share in shares for place, verdict in share.items()}
        return [by_place[place] for place in range(count)]
