"""Conversations on one engine: environments answer turns while further turns are generated.

After a turn and its answer a new request follows, whose prompt is everything so far and the
observation. Nothing is tokenized again, and vLLM's prefix cache has the keys and values of all full
blocks. All ranks of an engine continue the same conversations at the same step: its first rank has
the environments, and broadcasts their answers.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.data.rendering import Message, as_messages
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.engine.engine import ConversationSettings
from megatron_rl.engine.requests import (
    POLL_INTERVAL_STEPS,
    FinishedResponses,
    SequenceRequest,
    sampling_params,
    tensor_group,
)
from megatron_rl.engine.sampling_masks import join_masks
from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.environments.call_formats import begins_in_thinking
from megatron_rl.environments.interface import (
    FAILURE_REASONS,
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
    FailureKind,
    TurnTokens,
)
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import (
    REPLACES_HISTORY,
    FinishReason,
    GradeResult,
    Prompt,
    Response,
    SamplingSettings,
)

WAIT_SECONDS = 1.0  # for an answer while nothing is generated, between two signs of life
_ENDING = 32  # tokens of a context, more than a mark of thinking has
SCORED = "environment"  # the reason of a reward if the environment gave none


@dataclass
class _Conversation:
    """One response in progress."""

    position: int
    prompt: Prompt
    sample: int
    sampling: SamplingSettings
    token_ids: list[int] = field(default_factory=list)  # K
    logprobs: list[float] = field(default_factory=list)  # L
    masks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # of each turn
    observed: list[tuple[int, int]] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    begun: Sequence[Message] = ()  # messages before the first turn of the current sequence
    turn: list[int] = field(default_factory=list)  # tokens of the last turn
    turns: int = 0
    rewards: list[float | None] = field(default_factory=list)  # of each answer
    reason: str = ""
    sent: float = 0.0  # time at which the last turn was sent to the environment

    @property
    def context(self) -> list[int]:
        """All tokens of the current sequence."""
        if self.restarts:
            return self.token_ids[self.restarts[-1] :]
        return [*self.prompt.token_ids, *self.token_ids]

    @property
    def grade(self) -> GradeResult | None:
        """The sum of the rewards of turns; None if the environment gave none."""
        if all(reward is None for reward in self.rewards):
            return None
        rewards = [reward or 0.0 for reward in self.rewards]
        return GradeResult(math.fsum(rewards), self.reason or SCORED, None, turn_rewards=rewards)


class Conversations:
    """The conversations of one call on one engine; implements `requests.FurtherRequests`.

    prompts: with their numbers among all prompts of the call. on_advance: receives the number of
    turns and answers so far.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, Prompt, SamplingSettings]],
        settings: ConversationSettings,
        finished: FinishedResponses,
        *,
        stop: StopCriterion,
        max_model_len: int,
        on_advance: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.settings, self.finished = settings, finished
        self.stop, self.max_model_len = stop, max_model_len
        self.failure: Exception | None = None  # of this rank; raised by all ranks of the engine
        self.answered = 0
        self.costs: dict[str, float] = defaultdict(float)  # of this rank
        self._group, self._on_advance = tensor_group(), on_advance
        self._awaited: set[int] = set()
        self._held: list[tuple[int, Answer | EnvironmentFailure]] = []
        self._turns = self._polls = 0
        self._open = {
            number * finished.samples + sample: _Conversation(
                number * finished.samples + sample, prompt, sample, sampling, begun=prompt.messages
            )
            for number, prompt, sampling in prompts
            for sample in range(finished.samples)
        }

    @property
    def is_waiting(self) -> bool:
        """True while an environment has not answered a turn."""
        return bool(self._awaited)

    def run(self, run_requests: Callable[..., None]) -> dict[int, Response]:
        """Bring all conversations to their end by `running.run_requests`."""
        try:
            run_requests(self._begin(), on_finished=self.add_turn, further=self)
        finally:
            if self.settings.pool is not None:
                self.settings.pool.report_failures()
                for position in self._open:  # after an error, or a request to stop
                    self.settings.pool.end(position)
        return self.finished.own

    def sum_costs(self) -> dict[str, float]:
        """Return the costs of all engines; collective over all processes."""
        total: dict[str, float] = defaultdict(float)
        for costs in gather_from_ranks(dict(self.costs)):
            for name, value in costs.items():
                total[name] += value
        return dict(total)

    def _begin(self) -> list[SequenceRequest]:
        """Begin all conversations; returns the requests of their first turns.

        The seed of an environment is that of its prompt: the conversations of a group have the same
        environment, so that the group's mean reward is a baseline for each of them.
        """
        if self.settings.pool is not None:
            for position, one in self._open.items():
                seed = derive_seed(one.sampling.seed, "environment", one.prompt.index)
                self.settings.pool.begin(position, one.prompt.row, seed)
        return [self._request(one) for one in self._open.values()]

    def add_turn(self, position: int, output: Any) -> None:
        """Add vLLM's output of a turn, and send its text to the environment."""
        self._awaited.add(position)
        one, completion = self._open[position], output.outputs[0]
        one.turn = list(completion.token_ids)
        one.token_ids += one.turn
        one.logprobs += list(completion.logprobs.logprobs)
        if self.finished.masks is not None:
            one.masks.append(self.finished.masks.of(output))
        has_ended = completion.finish_reason == "stop" and one.turn[-1] in self.stop.token_ids
        decode = self.finished.tokenizer.decode
        text = decode(one.turn[:-1] if has_ended else one.turn, skip_special_tokens=False)
        one.messages.append({"role": "assistant", "content": text})
        if self.settings.pool is not None:
            if one.turns:
                self.costs["cached_tokens"] += output.num_cached_tokens or 0
                self.costs["context_tokens"] += len(output.prompt_token_ids)
            first, end = one.observed[-1] if one.turns else (0, 0)
            context = one.token_ids[first:end] if one.turns else list(one.prompt.token_ids)
            ending = decode(context[-_ENDING:], skip_special_tokens=False)
            tokens = TurnTokens(
                context=context,
                sampled=one.turn,
                logprobs=one.logprobs[-len(one.turn) :],
                is_complete=completion.finish_reason == "stop",  # also by a text of `rollout.stop`
                restarts=bool(one.restarts) and one.restarts[-1] == first,
                in_thinking=begins_in_thinking(ending),
            )
            self.settings.pool.send(position, text, tokens)
        one.sent = time.monotonic()
        one.turns += 1
        self._turns += 1
        self._on_advance(self._turns + self.answered)

    def next_requests(self, *, wait: bool) -> list[SequenceRequest]:
        """Return requests for the conversations whose environments have answered.

        wait: nothing is being generated, so that waiting up to `WAIT_SECONDS` delays nothing.
        Collective over the ranks of the engine.
        """
        self._polls += 1
        if self._group is not None and not wait and self._polls % POLL_INTERVAL_STEPS:
            return []  # a broadcast in every step would delay generation
        answers = self._poll(WAIT_SECONDS if wait else 0.0)
        self.answered += len(answers)
        if answers:
            self._on_advance(self._turns + self.answered)
        if self.settings.in_rounds:
            self._held += answers
            is_complete = wait and len(self._held) == len(self._awaited)
            answers, self._held = (self._held, []) if is_complete else ([], self._held)
        requests = [self._continue(*one) for one in sorted(answers, key=lambda one: one[0])]
        return [request for request in requests if request is not None]

    def _poll(self, timeout: float) -> list[tuple[int, Answer | EnvironmentFailure]]:
        answers: list[tuple[int, Answer | EnvironmentFailure]] = []
        error: Exception | None = None
        if self.settings.pool is not None:
            try:
                answers = [
                    (place, self._render(answer, self._open[place]))
                    for place, answer in self.settings.pool.poll(timeout)
                ]
            except Exception as caught:  # noqa: BLE001 - the other ranks wait for its broadcast
                error = caught
            now = time.monotonic()
            self.costs["seconds"] += sum(now - self._open[place].sent for place, _ in answers)
            self.costs["answers"] += len(answers)
        if self._group is not None:
            box = [(answers, error is not None)]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            answers, has_failed = box[0]
            if has_failed and error is None:
                error = RuntimeError("the environments of this engine failed on its first rank")
        if error is not None:
            raise error
        return answers

    def _render(
        self, answer: Answer | EnvironmentFailure, one: _Conversation
    ) -> Answer | EnvironmentFailure:
        """Return an answer as messages and tokens; a failure if these cannot follow."""
        pool = self.settings.pool
        if pool is None or isinstance(answer, EnvironmentFailure):
            return answer
        size, largest = len(self.finished.tokenizer), max(answer.token_ids or [0])
        if largest >= size:
            kind: FailureKind = "failed"
            text = f"returned token id {largest}, outside the tokenizer's {size}; send its tokens"
        elif answer.restarts and len(one.restarts) >= pool.settings.max_rewrites:
            kind = "rewritten"
            text = f"replaced the history of a conversation {len(one.restarts) + 1} times, more "
            text += (
                f"than environment.max_rewrites={pool.settings.max_rewrites}; raise it, or return "
            )
            text += "restarts=True less often"
        elif answer.done:
            return answer
        else:
            try:
                messages, tokens = self._observe(one, answer)
                return replace(answer, observation=messages, token_ids=tokens)
            except UserError as error:
                kind, text = "failed", f"returned what cannot follow: {error}"
        if pool.settings.on_error == "end":
            raise BrokenEnvironmentError(f"{pool.settings.name} {text}")
        failure = EnvironmentFailure(kind, f"{pool.settings.name} {text}")
        pool.count(failure)
        return failure

    def _continue(
        self, position: int, answer: Answer | EnvironmentFailure
    ) -> SequenceRequest | None:
        """Add an answer to its conversation; returns the next turn's request if there is one."""
        self._awaited.discard(position)
        one = self._open[position]
        if isinstance(answer, EnvironmentFailure):
            if self.settings.pool is not None:
                self.costs[answer.kind] += 1
            # What the policy wrote may be the cause, so the conversation is trained, with no
            # reward; only what has nothing to do with it may be left out.
            reason: FinishReason = "lost" if answer.kind == "lost" else "stop"
            grade = GradeResult(0.0, FAILURE_REASONS[answer.kind], None)
            self._end(one, reason, grade)
            return None
        one.rewards.append(answer.reward)
        one.reason = answer.reason or one.reason
        if answer.done:
            self._end(one, "stop", one.grade)
            return None
        messages, observed = as_messages(answer.observation), answer.token_ids or []
        before = 0 if answer.restarts else len(one.context)
        if one.turns >= self.settings.max_turns or self._room(one, before + len(observed)) < 1:
            self._end(one, "length", one.grade)
            return None
        if answer.restarts:
            one.restarts.append(len(one.token_ids))
            one.begun = messages
            messages = [messages[0] | {REPLACES_HISTORY: True}, *messages[1:]]
        one.observed.append((len(one.token_ids), len(one.token_ids) + len(observed)))
        one.token_ids += observed
        one.messages += messages
        return self._request(one)

    def _observe(self, one: _Conversation, answer: Answer) -> tuple[list[Message], list[int]]:
        """Return the messages and the tokens of an observation."""
        if answer.token_ids is not None:
            text = self.finished.tokenizer.decode(answer.token_ids, skip_special_tokens=False)
            return as_messages(text), list(answer.token_ids)
        messages = as_messages(answer.observation)
        if answer.restarts:
            return messages, self.settings.renderer.begin(messages, tools=one.prompt.tools)
        rendered = self.settings.renderer.render(one.begun, messages, tools=one.prompt.tools)
        return messages, self.settings.renderer.without_repeated_end(
            rendered, turn=one.turn, stop=self.stop.token_ids
        )

    def _request(self, one: _Conversation) -> SequenceRequest:
        seed = one.sampling.seed
        sampling = replace(
            one.sampling,
            seed=derive_seed(seed, "turn", one.turns) if one.turns else seed,
            max_tokens=min(
                self.settings.max_turn_tokens,
                one.sampling.max_tokens - len(one.logprobs),
                self._room(one, len(one.context)),
            ),
        )
        return SequenceRequest(
            position=one.position,
            token_ids=one.context,
            params=sampling_params(sampling, prompt=one.prompt, sample=one.sample, stop=self.stop),
        )

    def _room(self, one: _Conversation, context: int) -> int:
        """Tokens that the model takes after `context`; 0 if the policy may write no more."""
        if len(one.logprobs) >= one.sampling.max_tokens:
            return 0
        return self.max_model_len - context

    def _end(
        self, one: _Conversation, finish_reason: FinishReason, grade: GradeResult | None
    ) -> None:
        """End a conversation; its response is on the rank that decodes its position."""
        del self._open[one.position]
        if self.settings.pool is not None:
            self.settings.pool.end(one.position)
        response = Response(
            prompt_index=one.prompt.index,
            sample_index=one.sample,
            token_ids=np.array(one.token_ids, np.int32),
            rollout_logprobs=np.array(one.logprobs, np.float32),
            finish_reason=finish_reason,
            text=one.messages[-1]["content"],
            weight_version=self.finished.weight_version,
            observed=tuple(one.observed),
            restarts=tuple(one.restarts),
            messages=tuple(one.messages),
            grade=grade,
            **join_masks(one.masks),
        )
        try:
            self.finished.keep(one.position, response)
        except Exception as error:  # noqa: BLE001 - the other ranks of the engine go on until a check
            self.failure = self.failure or error
