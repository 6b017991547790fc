"""Generation time of a rollout batch, and the engine's memory, as research/docs/planner.md derives.

One decoding step reads the engine's weights once and the keys and values of every running sequence
(Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102). Sequences end at
different lengths, so the batch shrinks: the engine with the longest sequence is simulated from one
end of a sequence to the next.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from megatron_rl.apps.planning.devices import GIB, Device
from megatron_rl.apps.planning.parts import (
    active_parameters,
    cached_elements,
    engine_parameters,
    state_bytes,
)
from megatron_rl.apps.planning.workload import Workload
from megatron_rl.models.shape import ModelShape

STEP_SECONDS = 3e-3  # host time per step: scheduling, sampling, launching a captured graph
# Host time per running sequence and step: scheduling its token, its log-prob and its output.
# vLLM prepares one step while the device computes another, so a step takes the longer of the two.
SEQUENCE_SECONDS = 30e-6
LAYER_SECONDS = 12e-6  # small kernels of one layer
REDUCE_SECONDS = 12e-6  # latency of one all-reduce within an engine; two in a layer
GRAPHS = 2 * GIB  # captured graphs and temporaries of one step
MEMORY_PART, COMPUTE_PART = 0.75, 0.5  # of the device's rates
ADMITTED = 0.95  # maximum cache utilization at which a new sequence starts


@dataclass(frozen=True)
class Engine:
    """One vLLM engine of `tensor` devices, each with `memory` bytes for weights and cache."""

    shape: ModelShape
    tensor: int
    device: Device
    memory: int

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that fit in the cache; a sequence's states count as `state_tokens`."""
        left = self.memory - GRAPHS - 2 * engine_parameters(self.shape, self.tensor)
        return max(0, int(left // self.token_bytes))

    @property
    def state_tokens(self) -> float:
        """States of one sequence in gated delta nets, whatever its length, as cached tokens."""
        return state_bytes(self.shape, self.tensor) / self.token_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values, or of their latents, on one device."""
        return 2 * cached_elements(self.shape, self.tensor)

    def step_seconds(self, running: int, context: float) -> float:
        """Estimate the time of one decoding step; `context` is the cached tokens of all."""
        # States are read, as `context` has them, and written.
        states = state_bytes(self.shape, self.tensor) * running
        read = 2 * self._weights_read(running) + self.token_bytes * context + states
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
        """Estimate the time to prefill prompts or preempted sequences."""
        flops = 2 * active_parameters(self.shape) / self.tensor * tokens
        return flops / (self.device.tflops * 1e12 * COMPUTE_PART)

    def _weights_read(self, running: int) -> float:
        """Return the parameters per device that a step reads, without unused experts."""
        parameters = engine_parameters(self.shape, self.tensor)
        experts = self.shape.experts
        if experts is None:
            return parameters
        expert_parameters = (
            3 * self.shape.hidden_size * experts.ffn_hidden_size * experts.num_experts
        ) * len(self.shape.layers_with("experts")) / self.tensor  # fmt: skip
        unused = (1 - experts.experts_per_token / experts.num_experts) ** running
        return parameters - expert_parameters * unused

    def seconds(self, workload: Workload, *, engines: int) -> float:
        """Estimate the time of a rollout batch: that of the engine with the longest response."""
        lengths = share_with_the_longest(workload, engines)
        prompt_reads = (
            workload.mean_prompt * len(lengths) / workload.samples
        )  # one prefill per group
        return self.prefill_seconds(prompt_reads) + self._decode(lengths, workload)

    def _decode(self, lengths: list[int], workload: Workload) -> float:
        waiting, now, seconds = deque(lengths), 0, 0.0
        prompt = workload.mean_prompt + self.state_tokens
        running: list[tuple[int, int]] = []  # (end step, start step)
        context = 0.0  # tokens of all running sequences
        while waiting or running:
            while (
                waiting
                and len(running) < workload.max_num_seqs
                and (not running or context + prompt < ADMITTED * self.cached_tokens)
            ):
                heapq.heappush(running, (now + waiting.popleft(), now))
                context += prompt
            steps = running[0][0] - now
            free_steps = int((self.cached_tokens - context) // len(running))
            if free_steps < steps and len(running) > 1:  # the cache fills up: one is preempted
                steps = max(1, free_steps)
            seconds += steps * self.step_seconds(len(running), context + len(running) * steps / 2)
            now, context = now + steps, context + steps * len(running)
            while running and running[0][0] <= now:
                end, start = heapq.heappop(running)
                context -= prompt + end - start
            if context >= self.cached_tokens - len(running) and len(running) > 1:
                last = max(running, key=lambda sequence: sequence[1])
                running.remove(last)
                heapq.heapify(running)
                context -= prompt + now - last[1]
                waiting.append(last[0] - last[1])
        return seconds


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
