"""Workload of a step, and the generation time and memory of a rollout batch in vLLM's engines.

Response lengths are unknown before a run. Planning uses the quantiles of a log-normal distribution,
truncated at the response limit, in a fixed shuffled order.

One decoding step reads the engine's weights once and the keys and values of every running sequence
(Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102). Sequences end at
different lengths, so the batch shrinks: the engine with the longest sequence is simulated from one
end of a sequence to the next. A conversation that waits for its environment takes no place in the
batch, and its cache is found again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean

from megatron_rl.apps.planning.rates import RATES, Device, message_seconds
from megatron_rl.config import Config
from megatron_rl.data.packing import assign_packs, padded_length
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import EngineLayout

GRAPHS = 2 * 2**30  # bytes of captured graphs and temporaries of one step
ADMITTED = 0.95  # maximum cache utilization at which a new sequence starts
SPREAD = 0.8  # standard deviation of log length: the 84th percentile is 2.2 times the median
MEAN_PART = 0.45  # default mean response length as a fraction of the limit
MEAN_PROMPT = 160  # tokens; approximately that of DAPO-Math-17k


Request = tuple[int, tuple[int, ...]]  # tokens of a response before it, and those of each turn
SCORE_95 = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True)
class Answers:
    """Seconds in which environments answer a turn: log-normal, by mean and 95th percentile."""

    mean: float
    p95: float

    def seconds(self, count: int) -> tuple[float, ...]:
        """Return `count` quantiles in a fixed shuffled order.

        Raises UserError if no log-normal distribution has this mean and percentile.
        """
        spread = SCORE_95**2 - 2 * math.log(self.p95 / self.mean)
        if not 0 < self.mean <= self.p95 or spread < 0:
            most = self.mean * math.exp(SCORE_95**2 / 2)
            raise UserError(
                f"answers with a mean of {self.mean:g} s and a 95th percentile of {self.p95:g} s "
                f"are not log-normal: choose a percentile of {self.mean:g} to {most:.4g} s"
            )
        sigma = SCORE_95 - math.sqrt(spread)
        normal, median = NormalDist(), self.mean * math.exp(-(sigma**2) / 2)
        found = [median * math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        random.Random(0).shuffle(found)
        return tuple(found)


@dataclass(frozen=True)
class Workload:
    """Responses and updates of one step; lengths in tokens."""

    prompts: int
    samples: int
    minibatches: int
    epochs: int
    max_prompt: int
    max_response: int
    mean_prompt: int
    mean_response: int
    max_num_seqs: int  # concurrent sequences per engine
    batches: int = 1  # generated together, between two weight syncs
    every_tokens: int = 0  # of a window of partial rollouts; 0: responses are generated whole
    keeps_cache: bool = True  # between two windows
    turns: int = 1  # of the policy in every conversation, equally long
    answers: Answers | None = None  # of environments; None: they take no time

    @property
    def responses(self) -> int:
        """Number of responses of one step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Maximum tokens of prompt plus response."""
        return self.max_prompt + self.max_response

    def response_lengths(self) -> tuple[int, ...]:
        """Return the length of every response of a step, in generation order."""
        return clipped_lengths(self.responses, self.mean_response, self.max_response)

    def requests(self, lengths: Sequence[int]) -> list[Request]:
        """Divide responses into turns, or into the windows that one step generates.

        With windows, a step continues responses of several rollout batches, older ones first.
        """
        if self.every_tokens:
            windows = -(-self.max_response // self.every_tokens)
            return [
                (start, (min(self.every_tokens, length - start),))
                for start in range((windows - 1) * self.every_tokens, -1, -self.every_tokens)
                for length in lengths
                if length > start
            ]
        if self.answers is None:
            return [(0, (length,)) for length in lengths]
        cuts = [
            [length * turn // self.turns for turn in range(self.turns + 1)] for length in lengths
        ]
        return [(0, tuple(b - a for a, b in itertools.pairwise(cut) if b > a)) for cut in cuts]

    @property
    def scored_part(self) -> float:
        """Tokens of a pass for behavior log-probs in each step, over those of a rollout batch.

        Each window that recomputes its cache is scored, with what comes before it, by its weights.
        """
        if not self.every_tokens:
            return 1.0
        lengths = self.response_lengths()
        read = [start + new for start, (new,) in self.requests(lengths)]
        return sum(self.mean_prompt + each for each in read) / sum(
            self.mean_prompt + length for length in lengths
        )

    def packs(self, *, ranks: int, budget: int, alignment: int) -> Packs:
        """Pack one minibatch as the trainer does; return the busiest data-parallel rank's packs."""
        return _packs(self, ranks, budget, alignment)


@dataclass(frozen=True)
class Packs:
    """Number of packs of one rank, and their mean tokens and mean sum of squared lengths."""

    count: int
    tokens: float
    squares: float


def workload_of(
    config: Config,
    *,
    mean_prompt: int | None = None,
    mean_response: int | None = None,
    turns: int | None = None,
    answers: Answers | None = None,
) -> Workload:
    """Return the workload of a config, with default mean lengths.

    turns: by default the maximum of `config.environment`.
    """
    if turns is None:
        turns = config.environment.max_turns if config.environment else 1
    longest = config.max_packed_tokens - config.data.max_prompt_tokens  # with observations
    return Workload(
        prompts=config.rollout.prompts_per_step,
        samples=config.rollout.responses_per_prompt,
        minibatches=config.trainer.minibatches,
        epochs=config.trainer.epochs,
        max_prompt=config.data.max_prompt_tokens,
        max_response=longest,
        mean_prompt=mean_prompt or min(MEAN_PROMPT, config.data.max_prompt_tokens),
        mean_response=mean_response or max(1, round(MEAN_PART * longest)),
        max_num_seqs=config.rollout.max_num_seqs,
        batches=config.lag.sync_weights_every,
        every_tokens=config.lag.every_tokens,
        keeps_cache=config.lag.keeps_cache,
        turns=turns,
        answers=answers if turns > 1 else None,
    )


@lru_cache(maxsize=64)
def clipped_lengths(count: int, mean: int, limit: int) -> tuple[int, ...]:
    """Return quantiles of a log-normal distribution truncated at `limit`, with mean `mean`.

    Raises UserError if no such distribution has this mean.
    """
    if not 0 < mean <= 0.95 * limit:
        raise UserError(
            f"a mean response of {mean} tokens is impossible with a limit of {limit}: choose 1 to "
            f"{int(0.95 * limit)}"
        )
    normal = NormalDist()
    deviations = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]

    def lengths(median: float) -> list[float]:
        return [min(limit, median * math.exp(SPREAD * deviation)) for deviation in deviations]

    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    rounded = [max(1, round(length)) for length in lengths(low)]
    random.Random(0).shuffle(rounded)
    return tuple(rounded)


# Sequence length at which attention costs about as much as the matrix products.
BREAK_EVEN = 20_000


@lru_cache(maxsize=512)
def _packs(workload: Workload, ranks: int, budget: int, alignment: int) -> Packs:
    count = workload.responses // workload.minibatches
    lengths = [
        padded_length(workload.mean_prompt + length - 1, alignment=alignment)
        for length in workload.response_lengths()[:count]
    ]
    assigned = assign_packs(lengths, budget=budget // alignment * alignment, ranks=ranks)
    sums = []
    for packs in assigned:
        of_rank = [lengths[i] for pack in packs for i in pack]
        sums.append((sum(of_rank), sum(length**2 for length in of_rank)))
    tokens, squares = max(sums, key=lambda each: BREAK_EVEN * each[0] + each[1])
    number = max(map(len, assigned))
    return Packs(number, tokens / number, squares / number)


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of one rank of an engine: elements of weights and cache, bytes of states."""

    weights: int
    experts: int  # part of `weights`
    active: float  # weights that each token is multiplied by
    cached: float  # elements that it caches of a token
    states: float  # bytes of one sequence's states in gated delta nets, whatever its length


@lru_cache(maxsize=256)
def engine_sizes(
    shape: ModelShape, tensor: int, expert_parallel: bool = False, world_size: int | None = None
) -> EngineSizes:
    """Count the weights that vLLM loads, and what it caches of a token: keys, values or latents.

    With fewer key-value heads than ranks, heads are replicated; latents always are. The states of
    gated delta nets are float32, the last inputs of their convolutions bfloat16.
    """
    layout = EngineLayout(tensor, world_size or tensor, expert_parallel)
    counts = {
        name: math.prod(size) for name, size in layout.parameter_shapes(shape, rank=0).items()
    }
    if shape.tied_embeddings:
        counts.pop("lm_head.weight", None)
    weights = sum(counts.values())
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    active = float(weights)
    if not shape.tied_embeddings:
        active -= sum(count for name, count in counts.items() if "embed_tokens" in name)
    if shape.experts is not None:
        active -= experts * (1 - shape.experts.experts_per_token / shape.experts.num_experts)
    states = 0.0
    layers = shape.layers_with("attention") if shape.delta else range(shape.num_layers)
    if shape.delta is not None:
        taps = (shape.delta.kernel - 1) * shape.delta.conv_channels
        states = len(shape.delta.layers) * (4 * shape.delta.state_elements + 2 * taps) / tensor
    cached = 2 * len(layers) * max(1.0, shape.num_query_groups / tensor) * shape.head_dim
    if shape.latent is not None:
        cached = shape.num_layers * shape.sizes["latent"]
    return EngineSizes(weights, experts, active, cached, states)


@dataclass(frozen=True)
class Engine:
    """One vLLM engine of `tensor` devices, each with `memory` bytes for weights and cache."""

    shape: ModelShape
    tensor: int
    device: Device
    memory: int

    @property
    def sizes(self) -> EngineSizes:
        """Sizes of one rank."""
        return engine_sizes(self.shape, self.tensor)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that fit in the cache; a sequence's states count as `state_tokens`."""
        left = self.memory - GRAPHS - 2 * self.sizes.weights
        return max(0, int(left // self.token_bytes))

    @property
    def state_tokens(self) -> float:
        """Number of cached tokens that need as much memory as one sequence's delta-net states."""
        return self.sizes.states / self.token_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values, or of their latents, on one device."""
        return 2 * self.sizes.cached

    def step_seconds(self, running: int, context: float) -> float:
        """Estimate the time of one decoding step; `context` is the cached tokens of all."""
        sizes, device = self.sizes, self.device
        # States are read, as `context` has them, and written.
        read = 2 * self._weights_read(running) + self.token_bytes * context + sizes.states * running
        work = max(
            read / (device.memory_gb_s * 1e9 * RATES.decode_memory),
            2 * sizes.active * running / (device.tflops * 1e12 * RATES.decode_products),
            RATES.decode_sequence * running,
        )
        layers = self.shape.num_layers
        reduced = message_seconds(  # two all-reduces in a layer
            2 * layers * 2 * self.shape.hidden_size * running,
            device=device, ranks=self.tensor, stride=1, calls=2 * layers, passes=2,
        )  # fmt: skip
        return work + RATES.decode_step + layers * RATES.decode_layer + reduced

    def prefill_seconds(self, tokens: float) -> float:
        """Estimate the time to prefill prompts or preempted sequences."""
        flops = 2 * self.sizes.active * tokens
        return flops / (self.device.tflops * 1e12 * RATES.decode_products)

    def _weights_read(self, running: int) -> float:
        """Return the parameters per device that a step reads, without unused experts."""
        sizes, experts = self.sizes, self.shape.experts
        if experts is None:
            return sizes.weights
        unused = (1 - experts.experts_per_token / experts.num_experts) ** running
        return sizes.weights - sizes.experts * unused

    def seconds(self, workload: Workload, *, engines: int) -> float:
        """Estimate the time of generation between two weight syncs.

        It is that of the engine with the longest response.
        """
        together = replace(workload, prompts=workload.batches * workload.prompts)
        lengths = share_with_the_longest(together, engines)
        reads = workload.mean_prompt * len(lengths) / workload.samples  # one prefill per group
        if not workload.keeps_cache:
            reads += sum(start for start, _ in workload.requests(lengths))
        return self.prefill_seconds(reads) + self._decode(lengths, workload)

    def _decode(self, lengths: list[int], workload: Workload) -> float:
        waiting, now, seconds = deque(workload.requests(lengths)), 0, 0.0
        answers = _answer_seconds(workload, len(lengths))
        prompt = workload.mean_prompt + self.state_tokens
        running: list[tuple[int, int, int, tuple[int, ...]]] = []  # end and start step, and rest
        asked: list[tuple[float, Request]] = []  # what continues at a time
        context = 0.0  # tokens of all running sequences
        while waiting or running or asked:
            while asked and (asked[0][0] <= seconds or not (waiting or running)):
                answered, request = heapq.heappop(asked)
                seconds = max(seconds, answered)
                waiting.append(request)
            while (
                waiting
                and len(running) < workload.max_num_seqs
                and (not running or context + prompt + waiting[0][0] < self._admitted)
            ):
                before, turns = waiting.popleft()
                heapq.heappush(running, (now + turns[0], now, before, turns[1:]))
                context += prompt + before
            steps = running[0][0] - now
            free_steps = int((self.cached_tokens - context) // len(running))
            if free_steps < steps and len(running) > 1:  # the cache fills up: one is preempted
                steps = max(1, free_steps)
            each = self.step_seconds(len(running), context + len(running) * steps / 2)
            if asked and steps * each > asked[0][0] - seconds:  # another joins earlier
                steps = max(1, math.ceil((asked[0][0] - seconds) / each))
                each = self.step_seconds(len(running), context + len(running) * steps / 2)
            seconds += steps * each
            now, context = now + steps, context + steps * len(running)
            while running and running[0][0] <= now:
                end, start, before, turns = heapq.heappop(running)
                context -= prompt + before + end - start
                if turns:
                    heapq.heappush(asked, (seconds + next(answers), (before + end - start, turns)))
            if context >= self.cached_tokens - len(running) and len(running) > 1:
                last = max(running, key=lambda sequence: sequence[1])
                running.remove(last)
                heapq.heapify(running)
                end, start, before, turns = last
                context -= prompt + before + now - start
                waiting.append((before, (end - start, *turns)))
        return seconds

    @property
    def _admitted(self) -> float:
        return ADMITTED * self.cached_tokens


def _answer_seconds(workload: Workload, conversations: int) -> Iterator[float]:
    if workload.answers is None:
        return iter(())
    return iter(workload.answers.seconds(conversations * (workload.turns - 1)))


def share_with_the_longest(workload: Workload, engines: int) -> list[int]:
    """Return one engine's response lengths: evenly spaced quantiles, including the longest."""
    count = -(-workload.prompts // engines) * workload.samples
    ordered = sorted(workload.response_lengths())
    step = len(ordered) / count
    quantiles = [min(len(ordered) - 1, int((i + 0.5) * step)) for i in range(count)]
    chosen = [ordered[i] for i in quantiles]
    chosen[-1] = ordered[-1]
    # Spread long responses over the start order, as in a run.
    return [chosen[i * 7919 % count] for i in range(count)] if count % 7919 else chosen
