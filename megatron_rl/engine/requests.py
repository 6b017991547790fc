"""Requests for vLLM: one per response, each with its own seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt, SamplingSettings


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


def of_each(
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
        temperature=0.0,
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
