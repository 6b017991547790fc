"""What becomes of a request that has ended: a response, on one rank at once, on all at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.rollout.engine import Ended, Progress
from megatron_rl.rollout.response_gather import Generated
from megatron_rl.types import Prompt, Response


@dataclass
class FinishedResponses:
    """The responses of one call of `generate` that this rank decodes and hands on as they end.

    The ranks of an engine hold the same outputs: each takes the places of its share.
    """

    prompts: Sequence[Prompt]
    samples: int  # responses to each
    expected: int  # responses of this engine
    share: tuple[int, int]  # rank in its engine, ranks of the engine
    tokenizer: Any
    weight_version: int
    on_progress: Progress | None = None
    on_response: Ended | None = None
    own: list[Generated] = field(default_factory=list)
    _ended: int = 0

    def take(self, place: int, output: Any) -> None:
        """Keep vLLM's output of the request at `place`."""
        self._ended += 1
        if self.on_progress is not None:
            self.on_progress(self._ended, self.expected)
        rank, ranks = self.share
        if place % ranks == rank:
            self.own.append(self._generated(place, output))
            if self.on_response is not None:
                self.on_response(place, self.response(self.own[-1]))

    def response(self, generated: Generated) -> Response:
        """One response, its prompt known."""
        prompt, sample = divmod(generated.place, self.samples)
        return Response(
            prompt_index=self.prompts[prompt].index,
            sample_index=sample,
            token_ids=generated.token_ids,
            rollout_logprobs=generated.logprobs,
            text=generated.text,
            finish_reason="stop" if generated.finish_reason == "stop" else "length",
            weight_version=self.weight_version,
        )

    def _generated(self, place: int, output: Any) -> Generated:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        decode = self.tokenizer.decode if self.tokenizer else None
        return Generated(
            place=place,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(completion.logprobs.logprobs, np.float32),
            finish_reason=completion.finish_reason,
            text=decode(tokens, skip_special_tokens=True) if decode else "",
        )


def load_tokenizer(model_folder: str | Path) -> Any:
    """The folder's tokenizer, or None where it has none (texts are then empty)."""
    if not any(Path(model_folder).glob("tokenizer*")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)
