"""Requests for vLLM, one per response with its own seed: from prompts to decoded responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.engine.engine import OnFinished, ProgressCallback
from megatron_rl.engine.response_gather import Generated
from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.engine.sampling_masks import EngineSamplingMasks, join_masks
from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt, Response, SamplingSettings


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence for the engine, with its position among all sequences of the call."""

    position: int
    token_ids: Sequence[int]
    params: Any  # vllm.SamplingParams


def check_prompts(prompts: Sequence[Prompt], *, vocab_size: int, longest: int) -> None:
    """Raise ValueError naming the first prompt that is empty, too long or out of vocabulary."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= longest:
            raise UserError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens; "
                f"the engine takes 1 to {longest} before the response"
            )
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
            raise UserError(f"prompt {prompt.index} has a token outside 0..{vocab_size - 1}")


def sampling_per_prompt(
    sampling: SamplingSettings | Sequence[SamplingSettings], *, count: int
) -> Sequence[SamplingSettings]:
    """Return the sampling settings of each of `count` prompts."""
    return [sampling] * count if isinstance(sampling, SamplingSettings) else sampling


def sampling_requests(
    prompts: Sequence[tuple[int, Prompt, SamplingSettings]], *, samples: int, stop: StopCriterion
) -> list[SequenceRequest]:
    """Build `samples` requests for each numbered prompt, at positions number * samples + i.

    Seeds depend only on the prompt's sampling seed, its index and the sample. Without a seed the
    ranks of one engine would draw from different generators and sample different tokens.
    """
    return [
        SequenceRequest(
            position=number * samples + sample,
            token_ids=prompt.token_ids,
            params=sampling_params(sampling, prompt=prompt, sample=sample, stop=stop),
        )
        for number, prompt, sampling in prompts
        for sample in range(samples)
    ]


def sampling_params(
    sampling: SamplingSettings,
    *,
    prompt: Prompt,
    sample: int,
    stop: StopCriterion,
    each_step: bool = False,
) -> Any:
    """Build vLLM's SamplingParams for one response; each_step: return tokens in every step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=derive_seed(sampling.seed, "response", prompt.index, sample),
        stop_token_ids=list(stop.token_ids),
        stop=list(stop.texts),
        ignore_eos=True,  # only the stop tokens above apply
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=bool(stop.texts),
        output_kind=RequestOutputKind.DELTA if each_step else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared; vLLM takes as long to copy it as to generate three tokens
    )


def scoring_requests(sequences: Sequence[Sequence[int]]) -> list[SequenceRequest]:
    """Build requests that return the log-probs of the given tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        top_k=1,  # an engine that returns sampling masks takes no temperature of 0
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return [
        SequenceRequest(position=position, token_ids=sequence, params=params)
        for position, sequence in enumerate(sequences)
    ]


def read_scores(outputs: Mapping[int, Any], sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probs of each sequence's tokens from the second on, [length - 1] float32."""
    scores = []
    for index, sequence in enumerate(sequences):
        pairs = zip(outputs[index].prompt_logprobs[1:], sequence[1:], strict=True)
        scores.append(torch.tensor([position[token].logprob for position, token in pairs]))
    return scores


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
    masks: EngineSamplingMasks | None = None
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
            mask_ids=generated.mask_ids,
            mask_counts=generated.mask_counts,
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
            **join_masks([] if self.masks is None else [self.masks.of(output)]),
            routes=_NO_ROUTES if self.routes is None else self.routes.of(output),
        )
