"""What is asked of vLLM: one request per response, each with its own seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rollout.stopping import StopRule
from megatron_rl.seeds import derive_seed
from megatron_rl.types import Prompt, SamplingSettings


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence for the engine; `place` is its position in the order of the whole call."""

    place: int
    token_ids: Sequence[int]
    params: Any  # vllm.SamplingParams


def check_prompts(prompts: Sequence[Prompt], *, vocab_size: int, longest: int) -> None:
    """ValueError naming the first prompt that is empty, too long, or not of this vocabulary."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= longest:
            raise ValueError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens; "
                f"the engine takes 1 to {longest} before the response"
            )
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
            raise ValueError(f"prompt {prompt.index} has a token outside 0..{vocab_size - 1}")


def sampling_requests(
    prompts: Sequence[tuple[int, Prompt]],
    *,
    samples: int,
    sampling: SamplingSettings,
    stop: StopRule,
) -> list[SequenceRequest]:
    """`samples` requests for each (position, prompt); a response's place is position * samples + i.

    Seeds depend on the prompt's index and the sample alone. Without a seed the ranks of one
    engine would draw from different generators and disagree about what was sampled.
    """
    return [
        SequenceRequest(
            place=position * samples + sample,
            token_ids=prompt.token_ids,
            params=sampling_params(sampling, prompt=prompt, sample=sample, stop=stop),
        )
        for position, prompt in prompts
        for sample in range(samples)
    ]


def sampling_params(
    sampling: SamplingSettings,
    *,
    prompt: Prompt,
    sample: int,
    stop: StopRule,
    each_step: bool = False,
) -> Any:
    """vLLM's SamplingParams of one response; each_step: tokens are told as they are generated."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=derive_seed(sampling.seed, "response", prompt.index, sample),
        stop_token_ids=list(stop.token_ids),
        stop=list(stop.texts),
        ignore_eos=True,  # the stop tokens above are all there are
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(stop.texts),
        output_kind=RequestOutputKind.DELTA if each_step else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else has it; copying takes vLLM as long as three tokens
    )


def scoring_requests(sequences: Sequence[Sequence[int]]) -> list[SequenceRequest]:
    """Requests whose result holds the log-probs of the given tokens."""
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
        SequenceRequest(place=place, token_ids=sequence, params=params)
        for place, sequence in enumerate(sequences)
    ]
