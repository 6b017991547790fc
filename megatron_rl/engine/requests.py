"""Requests for vLLM, one per response with its own seed: from prompts to decoded responses."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.engine.engine import OnFinished, ProgressCallback
from megatron_rl.engine.response_gather import Generated
from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt, Response, SamplingSettings


@dataclass(frozen=True)
class StopCriterion:
    """Tokens and texts that end a response; a text does so wherever it occurs."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def describe(self, tokenizer: Any) -> str:
        """Describe in one line what ends a response."""
        names = tokenizer.convert_ids_to_tokens(list(self.token_ids)) if tokenizer else []
        tokens = ", ".join(
            f"{token} {name}" for token, name in zip(self.token_ids, names, strict=False)
        )
        texts = "".join(f", or the text {text!r}" for text in self.texts)
        return f"a response ends with token {tokens or self.token_ids}{texts}"


def find_stop_rule(
    model_folder: str | Path,
    tokenizer: Any,
    *,
    vocab_size: int,
    token_ids: Sequence[int] = (),
    texts: Sequence[str] = (),
) -> StopCriterion:
    """Collect the stop tokens of a model and add those given.

    Reads `eos_token_id` from generation_config.json, config.json and the tokenizer: chat models
    often name the end-of-turn token in only one of them, and a response would then never stop.
    Raises ValueError if there is none, or if a token is outside the vocabulary.
    """
    stop_tokens: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        value = _read_eos(path) if path.is_file() else None
        if value is not None:
            stop_tokens += value if isinstance(value, list) else [value]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stop_tokens.append(tokenizer.eos_token_id)
    stop_tokens += token_ids
    if not stop_tokens:
        raise UserError(
            f"{model_folder}: neither its configs nor its tokenizer name an end of text "
            "(eos_token_id), so a response would never end; set rollout.stop_token_ids"
        )
    if outside := [token for token in stop_tokens if not 0 <= token < vocab_size]:
        raise UserError(
            f"{model_folder}: stop token {outside[0]} is outside the vocabulary "
            f"0..{vocab_size - 1}; correct eos_token_id of its configs and tokenizer, or "
            "rollout.stop_token_ids"
        )
    return StopCriterion(tuple(dict.fromkeys(stop_tokens)), tuple(texts))


def _read_eos(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); download it again") from None


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
