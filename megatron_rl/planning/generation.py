"""Seconds of generating a rollout batch, and the engine's memory; docs/planning.md derives them.

One decoding step reads the engine's weights once and the keys and values of every running sequence
(Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102). Sequences end at
different lengths, so the batch shrinks: the engine that has the longest one is followed step by
step, from one ending to the next.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import GIB, Device
from megatron_rl.planning.parts import active_parameters, engine_parameters
from megatron_rl.planning.workload import Workload

STEP_SECONDS = 3e-3  # of the host for one step: scheduling, sampling, launching a captured graph
# Of the host for a running sequence and step: scheduling its token, its log-prob and its output.
# vLLM prepares one step while the device computes another, so the longer of both counts.
SEQUENCE_SECONDS = 30e-6
LAYER_SECONDS = 12e-6  # kernels of one layer that move little
REDUCE_SECONDS = 12e-6  # latency of one all-reduce within an engine; two in a layer
GRAPHS = 2 * GIB  # captured graphs, and what one step works with
MEMORY_PART, COMPUTE_PART = 0.75, 0.5  # of the device's rates
ADMITTED = 0.95  # of the cache that sequences may fill that have not begun


@dataclass(frozen=True)
class Engine:
    """One vLLM engine of `tensor` devices, each with `memory` bytes for weights and cache."""

    shape: ModelShape
    tensor: int
    device: Device
    memory: int

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        left = self.memory - GRAPHS - 2 * engine_parameters(self.shape, self.tensor)
        return max(0, int(left // self.token_bytes))

    @property
    def token_bytes(self) -> float:
        """Keys and values of one token on one device."""
        groups = max(1.0, self.shape.num_query_groups / self.tensor)
        return 4 * self.shape.num_layers * groups * self.shape.head_dim

    def step_seconds(self, running: int, context: float) -> float:
        """One decoding step of `running` sequences that have `context` tokens in all."""
        read = 2 * self._weights_read(running) + self.token_bytes * context
        computed = 2 * active_parameters(self.shape) / self.tensor * running
        device = self.device
        work = max(
            read / (device.memory_gb_s * 1e9 * MEMORY_PART),
            computed / (device.tflops * 1e12 * COMPUTE_PART),
            SEQUENCE_SECONDS * running,
        )
        fixed = STEP_SECONDS + self.shape.num_layers * LAYER_SECONDS
        if self.tensor > 1:
            fixed += 2 * self.shape.num_layers * REDUCE_SECONDS
        return work + fixed

    def prefill_seconds(self, tokens: float) -> float:
        """Reading prompts, or what a sequence had when it was put back."""
        flops = 2 * active_parameters(self.shape) / self.tensor * tokens
        return flops / (self.device.tflops * 1e12 * COMPUTE_PART)

    def _weights_read(self, running: int) -> float:
        """Parameters of one device that a step reads: of experts those that any token chose."""
        held = engine_parameters(self.shape, self.tensor)
        experts = self.shape.experts
        if experts is None:
            return held
        of_experts = (
            3 * self.shape.hidden_size * experts.ffn_hidden_size * experts.num_experts
        ) * self.shape.num_layers / self.tensor  # fmt: skip
        missed = (1 - experts.experts_per_token / experts.num_experts) ** running
        return held - of_experts * missed

    def seconds(self, workload: Workload, *, engines: int) -> float:
        """Of the whole rollout batch: of the engine that gets the longest response."""
        lengths = share_with_the_longest(workload, engines)
        prompt_reads = workload.mean_prompt * len(lengths) / workload.samples  # siblings share it
        return self.prefill_seconds(prompt_reads) + self._decode(lengths, workload)

    def _decode(self, lengths: list[int], workload: Workload) -> float:
        waiting, prompt, now, seconds = deque(lengths), workload.mean_prompt, 0, 0.0
        running: list[tuple[int, int]] = []  # (step at which it ends, step at which it began)
        context = 0  # tokens of all that run
        while waiting or running:
            while (
                waiting
                and len(running) < workload.max_sequences
                and (not running or context + prompt < ADMITTED * self.cached_tokens)
            ):
                heapq.heappush(running, (now + waiting.popleft(), now))
                context += prompt
            steps = running[0][0] - now
            room = (self.cached_tokens - context) // len(running)
            if room < steps and len(running) > 1:  # the cache is full: the last one starts again
                steps = max(1, room)
            seconds += steps * self.step_seconds(len(running), context + len(running) * steps / 2)
            now, context = now + steps, context + steps * len(running)
            while running and running[0][0] <= now:
                end, began = heapq.heappop(running)
                context -= prompt + end - began
            if context >= self.cached_tokens - len(running) and len(running) > 1:
                last = max(running, key=lambda each: each[1])
                running.remove(last)
                heapq.heapify(running)
                context -= prompt + now - last[1]
                waiting.append(last[0] - last[1])
        return seconds


def share_with_the_longest(workload: Workload, engines: int) -> list[int]:
    """Lengths that one engine generates: every so many quantiles, the longest among them."""
    count = -(-workload.prompts // engines) * workload.samples
    ordered = sorted(workload.response_lengths())
    step = len(ordered) / count
    places = [min(len(ordered) - 1, int((place + 0.5) * step)) for place in range(count)]
    chosen = [ordered[place] for place in places]
    chosen[-1] = ordered[-1]
    # Long ones are spread over the order of starting, as they are in a run.
    return [chosen[place * 7919 % count] for place in range(count)] if count % 7919 else chosen
