"""The tokens that the engine's sampler kept when it drew each token of a request.

Top-k, top-p and min-p remove tokens before one is drawn; the policy that generated is the model's
distribution over the rest. vLLM returns these sampling masks on CUDA (`return_sampling_mask`, in
its newer model runner). On a CPU, where only the older runner exists, they are read from what its
sampler returns: log-probs over the whole vocabulary, which are -inf where a token was removed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.engine.engine_arguments import knows_argument, uses_newer_runner
from megatron_rl.engine.routes import find_request
from megatron_rl.errors import UserError
from megatron_rl.types import SamplingSettings, no_ids

_ARGUMENT = "return_sampling_mask"
_SETTINGS = "rollout.top_k, rollout.top_p and rollout.min_p"


def bound_sampling(sampling: SamplingSettings, *, vocab_size: int) -> SamplingSettings:
    """Return equal settings that an engine with masks accepts: a top-k, and no temperature of 0."""
    if sampling.temperature == 0:
        return replace(sampling, temperature=1.0, top_k=1)
    return sampling if sampling.top_k else replace(sampling, top_k=vocab_size)


def join_masks(masks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Put the masks of parts of a response together, as the fields of a `Response`."""
    ids, counts = zip((no_ids(), no_ids()), *masks, strict=True)
    return {"mask_ids": np.concatenate(ids), "mask_counts": np.concatenate(counts)}


class EngineSamplingMasks:
    """Reads the sampling masks of a request's outputs; an `EngineFeature`.

    is_recording: only then does an engine on a CPU record masks.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self.is_recording = False
        # By vLLM's name of a request: the kept ids of each token, by its position.
        self._recorded: dict[str, dict[int, np.ndarray]] | None = None if on_cuda else {}

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments; raises ValueError if this vLLM cannot return masks."""
        if self._recorded is not None:
            return {}
        if not knows_argument(_ARGUMENT):
            raise UserError(
                f"{_SETTINGS} need a vLLM that returns the tokens that its sampler kept "
                f"({_ARGUMENT}), which this one does not; install a newer one, or unset them"
            )
        if not uses_newer_runner():
            raise UserError(
                f"{_SETTINGS} need vLLM's newer model runner, which alone returns the tokens that "
                "its sampler kept; unset VLLM_USE_V2_MODEL_RUNNER, or unset them"
            )
        return {_ARGUMENT: True}

    def start(self, llm: Any) -> None:
        if self._recorded is not None:
            self._record(llm)

    def begin(self, sampling: Iterable[SamplingSettings]) -> "EngineSamplingMasks | None":
        """Forget requests that never finished; returns itself if one of these calls wants masks."""
        self.is_recording = any(one.returns_masks for one in sampling)
        if self._recorded:
            self._recorded.clear()
        return self if self.is_recording else None

    def of(self, output: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (kept ids of all tokens in `output`, number of each token's); int32.

        Raises RuntimeError unless each of its tokens has a mask, and is in it.
        """
        tokens = np.array(output.outputs[0].token_ids, np.int32)
        if self._recorded is None:
            found = output.outputs[0].sampling_mask
            rows: Sequence[Any] = [] if found is None else found.token_ids
        else:
            rows = self._take(output.request_id, len(tokens))
        counts = np.array([len(row) for row in rows], np.int32)
        ids = np.concatenate([np.empty(0, np.int32), *(np.array(row, np.int32) for row in rows)])
        is_there = len(counts) == len(tokens) and (len(tokens) == 0 or counts.min() > 0)
        if not is_there or (ids == np.repeat(tokens, counts)).sum() != len(tokens):
            raise RuntimeError(
                f"the engine returned {len(counts)} sampling masks for {len(tokens)} tokens, or "
                f"masks without the sampled token; unset {_SETTINGS}"
            )
        return ids, counts

    def _take(self, name: str, count: int) -> list[np.ndarray]:
        """Remove and return the masks of the next `count` tokens of a request."""
        assert self._recorded is not None
        known = find_request(self._recorded, name)
        recorded = self._recorded.pop(known, {})
        rows = [recorded.pop(position) for position in sorted(recorded)[:count]]
        if recorded:
            self._recorded[known] = recorded
        return rows

    def _record(self, llm: Any) -> None:
        """Keep the ids that the sampler leaves in each step of the engine."""
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        draw = runner.sampler.sample

        def draw_and_record(*args: Any, **kwargs: Any) -> Any:
            sampled, logprobs = draw(*args, **kwargs)
            if self.is_recording:
                self._append_step(runner, logprobs.isfinite().numpy())
            return sampled, logprobs

        runner.sampler.sample = draw_and_record

    def _append_step(self, runner: Any, kept: np.ndarray) -> None:
        """Add the masks of one step; kept: [requests, vocabulary].

        A token that is drawn and not used has the position of the one that follows, which replaces
        it.
        """
        assert self._recorded is not None
        for name, row in zip(runner.input_batch.req_ids, kept, strict=True):
            position = len(runner.requests[name].output_token_ids)
            self._recorded.setdefault(name, {})[position] = np.flatnonzero(row).astype(np.int32)
