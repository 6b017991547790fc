"""Conversion of finished requests to responses, on the rank that decodes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.engine.engine import OnFinished, ProgressCallback
from megatron_rl.engine.response_gather import Generated
from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.types import Prompt, Response

_NO_ROUTES = np.empty(0, np.uint8)


@dataclass
class FinishedResponses:
    """Responses of one `generate` call that this rank decodes and passes on as they finish.

    All ranks of an engine receive the same outputs; each decodes its share of the positions.
    """

    prompts: Sequence[Prompt]
    samples: int  # responses per prompt
    expected: int  # responses of this engine
    share: tuple[int, int]  # rank within the engine, number of its ranks
    tokenizer: Any
    weight_version: int
    on_progress: ProgressCallback | None = None
    on_response: OnFinished | None = None
    routes: EngineRoutes | None = None
    own: list[Generated] = field(default_factory=list)
    _num_finished: int = 0

    def __post_init__(self) -> None:
        if self.routes is not None:
            self.routes.clear()

    def add(self, position: int, output: Any) -> None:
        """Add vLLM's output of the request at `position`."""
        self._keep(position, lambda: self._generated(position, output))

    def keep(self, generated: Generated) -> None:
        """Add a response that is complete."""
        self._keep(generated.position, lambda: generated)

    def _keep(self, position: int, build: Callable[[], Generated]) -> None:
        self._num_finished += 1
        if self.on_progress is not None:
            self.on_progress(self._num_finished, self.expected)
        rank, ranks = self.share
        if position % ranks == rank:
            self.own.append(build())
            if self.on_response is not None:
                self.on_response(position, self.response(self.own[-1]))

    def response(self, generated: Generated) -> Response:
        """Build the response from one generated sequence."""
        prompt, sample = divmod(generated.position, self.samples)
        return Response(
            prompt_index=self.prompts[prompt].index,
            sample_index=sample,
            token_ids=generated.token_ids,
            rollout_logprobs=generated.rollout_logprobs,
            text=generated.text,
            finish_reason=generated.finish_reason,
            weight_version=self.weight_version,
            owner=generated.owner,
            observed=generated.observed,
            restarts=generated.restarts,
            messages=generated.messages,
            grade=generated.grade,
            routes=generated.routes,
        )

    def _generated(self, position: int, output: Any) -> Generated:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        decode = self.tokenizer.decode if self.tokenizer else None
        return Generated(
            position=position,
            token_ids=np.array(tokens, np.int32),
            rollout_logprobs=np.array(completion.logprobs.logprobs, np.float32),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            text=decode(tokens, skip_special_tokens=True) if decode else "",
            routes=_NO_ROUTES if self.routes is None else self.routes.of(output),
        )
