"""Grading of responses: every rank grades its own responses in its worker processes."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from megatron_rl.distributed.agreement import StragglerBarrier, sync_errors_across_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.environments.interface import FAILURE_REASONS
from megatron_rl.rewards.pool import GradingSession, VerifierPool
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import GradeResult, Prompt, Response, Rollout
from megatron_rl.workers.client import START_SECONDS


@dataclass
class Grader:
    """Turns responses into rollouts; grades each response as soon as it ends."""

    pool: VerifierPool
    topology: Topology
    on_progress: Callable[[], object] = lambda: None
    _session: GradingSession | None = None
    _of_environments: dict[int, GradeResult] = field(default_factory=dict)  # on this rank
    _graded: int = 0
    _prompts: int = 0  # since the last check, and the reasons of their grades
    _reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # Longest time of a worker without progress: it is starting, or grading.
        patience = 2 * START_SECONDS + 2 * self.pool.settings.time_limit_seconds
        self._work = StragglerBarrier("grading responses", patience=patience)

    def begin(self, prompts: Sequence[Prompt], *, samples: int) -> Callable[[int, Response], None]:
        """Return a callback for each response that ends on this rank: (position, response).

        The position of sample s of prompt p is p * samples + s.
        """
        session = self._session = self.pool.begin()
        self._of_environments = {}

        def submit(place: int, response: Response) -> None:
            if response.grade is not None:
                self._of_environments[place] = response.grade
                return
            prompt = prompts[place // samples]
            row = with_conversation(prompt, response)
            item = Item(response.text, prompt.ground_truth, prompt.data_source, row)
            try:
                session.submit(place, item)
            except VerifierError as error:  # raised for an earlier response
                text = _sentence(error, on_error=self.pool.settings.on_error)
                raise VerifierError(f"grading responses: {text}") from error

        return submit

    def finish(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Rollout]:
        """Rollouts in the order of `responses`, the same on every rank; collective.

        `responses` has the same number of responses for each prompt, in prompt order.
        """
        assert self._session is not None, "begin comes first"
        with sync_errors_across_ranks(doing="grading responses"):
            self._work.begin()
            try:
                own = self._session.finish(on_progress=self._report)
            except VerifierError as error:
                raise VerifierError(
                    _sentence(error, on_error=self.pool.settings.on_error)
                ) from error
            finally:
                self._work.finish(while_waiting=self.on_progress)
        grade_results = self._gather(own | self._of_environments, count=len(responses))
        self._prompts += len(prompts)
        self._reasons.update(grade_result.reason for grade_result in grade_results)
        samples = len(responses) // len(prompts)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        return [
            Rollout(prompt=prompt, response=_without_grade(response), grade_result=grade_result)
            for prompt, response, grade_result in zip(
                repeated, responses, grade_results, strict=True
            )
        ]

    def check(self, *, prompts: int) -> None:
        """Raise VerifierError on every rank if none of the latest responses was graded.

        Checks all calls since the last check once they had at least `prompts` prompts: failures on
        a single unusual prompt do not mean that the verifier is broken.
        """
        if self._prompts < prompts:
            return
        self._prompts, reasons, self._reasons = 0, self._reasons, Counter()
        total = reasons.total()
        if reasons[FAILED] == total:
            raise VerifierError(
                f"the verifier failed on each of {total} responses, so no reward means "
                "anything; the log has the first error of every rank"
            )
        broken = {reason: reasons[reason] for reason in FAILURE_REASONS.values() if reasons[reason]}
        if sum(broken.values()) == total:
            counts = ", ".join(f"{count} times {reason}" for reason, count in broken.items())
            raise VerifierError(
                f"none of {total} conversations came to an end ({counts}), so no reward means "
                "anything; the log has what the environments printed"
            )
        if reasons[TIME_LIMIT] + reasons[FAILED] == total:
            limit = self.pool.settings.time_limit_seconds
            raise VerifierError(
                f"none of {total} responses was graded within reward.time_limit_seconds={limit:g}, "
                "so no reward means anything; raise it"
            )

    def _report(self, graded: int) -> None:
        if graded != self._graded:
            self._graded = graded
            self._work.advance(graded)
            self.on_progress()
        elif self.pool.is_within_limits:  # not stalled: the pool ends each call at its limit
            self.on_progress()

    def _gather(self, own: dict[int, GradeResult], *, count: int) -> list[GradeResult]:
        shares = [own] * self.topology.world_size
        if self.topology.world_size > 1:
            dist.all_gather_object(shares, own)
        by_place = {
            place: grade_result for share in shares for place, grade_result in share.items()
        }
        return [by_place[place] for place in range(count)]


def with_conversation(prompt: Prompt, response: Response) -> str:
    """Return the row of the prompt as JSON; `conversation` has all messages if there are turns."""
    if not response.messages:
        return prompt.row
    return json.dumps(
        json.loads(prompt.row) | {"conversation": [*prompt.messages, *response.messages]}
    )


def _without_grade(response: Response) -> Response:
    """Drop the grade of an environment, which the rollout has."""
    return response if response.grade is None else replace(response, grade=None)


def _sentence(error: VerifierError, *, on_error: str) -> str:
    """Error of a verifier in one line, with suggestions; the traceback stays in the cause."""
    first, *frames = str(error).strip().splitlines()
    text = f"{first.rstrip(':')}: {frames[-1].strip()}" if frames else first
    if "failed on response" not in first:
        return text
    suggestions = ["reward.on_error=zero, which gives such a response no reward"]
    suggestions += ["reward.on_error=retry"] if on_error == "end" else []
    return f"{text}; correct the verifier, or set {', or '.join(suggestions)}"
