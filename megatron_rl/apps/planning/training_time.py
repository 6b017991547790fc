"""Duration of the behavior pass and of updates, by formula; research/docs/planner.md derives them.

A layer's pass takes the sum of its matrix products, attention, memory traffic and collectives, and
at least the time to launch its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.apps.planning.devices import Device
from megatron_rl.apps.planning.footprint import (
    GRADIENT,
    OPTIMIZER,
    WEIGHT,
    state_bytes,
)
from megatron_rl.apps.planning.layer_bytes import kept_per_token
from megatron_rl.apps.planning.parts import Parts, count_trained
from megatron_rl.apps.planning.traffic import Traffic
from megatron_rl.apps.planning.workload import Packs, Workload
from megatron_rl.models.shape import ModelShape, weight_shapes


@dataclass(frozen=True)
class Efficiency:
    """Achieved fractions of a device's peak rates, and the host's kernel launch cost."""

    matmul: float = 0.70  # of the bfloat16 peak, at these sizes
    attention: float = 0.54  # of the same peak, fused attention, forward and backward
    memory: float = 0.80
    layer_launch: float = 250e-6  # seconds: some 40 kernels of one layer's forward pass


@dataclass(frozen=True)
class TrainingTime:
    """Training time of one layout on one type of device."""

    shape: ModelShape
    parts: Parts
    device: Device
    efficiency: Efficiency = Efficiency()

    def behavior(self, workload: Workload) -> float:
        """Estimate the log-probs of all packs of a rollout batch, forward only."""
        return workload.minibatches * self._pass_seconds(self._packs(workload), backward=False)

    def update(self, workload: Workload) -> float:
        """Estimate one optimizer update."""
        return (
            self._pass_seconds(self._packs(workload), backward=True)
            + self._optimizer()
            + max(Traffic(self.parts, self.device).replicas(self.shape, s) for s in self._stages())
        )

    def offload(self) -> float:
        """Estimate offloading the optimizer state to the host and back, once per step."""
        awake, asleep = state_bytes(self.shape, self.parts, stage=0)
        parameters = count_trained(self.shape, self.parts, stage=0).total
        return 2 * (awake - asleep - GRADIENT * parameters) / (self.device.host_gb_s * 1e9)

    def _packs(self, workload: Workload) -> Packs:
        parts = self.parts
        return workload.packs(ranks=parts.data, budget=parts.tokens, alignment=parts.alignment)

    def _stages(self) -> Sequence[int]:
        return self.parts.stages(self.shape)

    def _pass_seconds(self, packs: Packs, *, backward: bool) -> float:
        """Estimate the busiest rank's packs on the slowest stage, plus the pipeline bubble."""
        slowest = max(self._pack(packs, stage, backward=backward) for stage in self._stages())
        return (packs.count + self.parts.pipeline - 1) * slowest

    def _pack(self, pack: Packs, stage: int, *, backward: bool) -> float:
        """Estimate one micro-batch on one stage."""
        depth = self.parts.depth(self.shape, stage=stage)
        seconds = depth * self._layer(pack, backward=backward)
        if stage == self.parts.pipeline - 1:
            seconds += self._head(pack, backward=backward)
        tokens = pack.tokens / self.parts.context
        hidden = 2 * tokens * self.shape.hidden_size
        # The gathers of the last layer and of the head.
        traffic = Traffic(self.parts, self.device)
        seconds += traffic.tensor(hidden, 1) * (2 if backward else 1)
        return seconds + traffic.pipeline(hidden / self.parts.tensor) * (2 if backward else 1)

    def _layer(self, pack: Packs, *, backward: bool) -> float:
        forward = self._layer_forward(pack)
        if not backward:
            return forward
        compute, exchange = self._layer_backward(pack)
        recomputed = {"none": 0.0, "full": forward, "selective": self._mlp_forward(pack)}
        return forward + recomputed[self.parts.recompute] + compute + exchange

    def _matmul(self, flops: float) -> float:
        return flops / (self.device.tflops * 1e12 * self.efficiency.matmul)

    def _attend(self, flops: float) -> float:
        return flops / (self.device.tflops * 1e12 * self.efficiency.attention)

    def _move(self, size: float) -> float:
        return size / (self.device.memory_gb_s * 1e9 * self.efficiency.memory)

    def _layer_flops(self, pack: Packs) -> tuple[float, float]:
        """Return the FLOPs (matrix products, attention) of one layer's forward pass on one rank."""
        parts, shape = self.parts, self.shape
        tokens, query = pack.tokens / parts.context, shape.sizes["query"]
        weights = shape.hidden_size * (2 * query + 2 * shape.sizes["key"])
        if shape.latent is not None:
            weights = _latent_weights(shape)
        products = 2 * tokens * (weights + self._mlp_weights()) / parts.tensor
        # A query attends to half of its sequence's keys: 2 products of 2 FLOPs, L^2 / 2 pairs.
        return products, 2 * query / parts.tensor * pack.squares / parts.context

    def _mlp_weights(self) -> float:
        """Count the MLP parameters used per token."""
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 3 * shape.hidden_size * shape.ffn_hidden_size
        ffn = experts.experts_per_token * experts.ffn_hidden_size
        ffn += experts.shared_ffn_hidden_size or 0
        return shape.hidden_size * (3 * ffn + experts.num_experts)

    def _layer_forward(self, pack: Packs) -> float:
        products, attention = self._layer_flops(pack)
        passes = 2.5 * kept_per_token(self.shape, self.parts) * pack.tokens / self.parts.context
        seconds = self._matmul(products) + self._attend(attention) + self._move(passes)
        return max(seconds, self.efficiency.layer_launch) + self._exchange(pack, calls=1)

    def _mlp_forward(self, pack: Packs) -> float:
        tokens = pack.tokens / self.parts.context
        products = 2 * tokens * self._mlp_weights() / self.parts.tensor
        return self._matmul(products)

    def _layer_backward(self, pack: Packs) -> tuple[float, float]:
        """Estimate (compute, communication): products twice, attention 3.5 times (recomputed).

        Frozen weights have no gradient: products once. The adapters' own products are small.
        """
        products, attention = self._layer_flops(pack)
        passes = 5 * kept_per_token(self.shape, self.parts) * pack.tokens / self.parts.context
        depth = self.parts.depth(self.shape, stage=0)
        weights = count_trained(self.shape, self.parts, stage=0).total / depth
        accumulation = self._move((WEIGHT + 2 * GRADIENT) * weights)  # of weight gradients
        factor = 1 if self.parts.lora_rank else 2
        seconds = (
            self._matmul(factor * products) + self._attend(3.5 * attention) + self._move(passes)
        )
        compute = max(seconds + accumulation, 2 * self.efficiency.layer_launch)
        return compute, self._exchange(pack, calls=2)

    def _exchange(self, pack: Packs, *, calls: int) -> float:
        """Estimate the collectives of one layer's forward pass (calls=1) or backward pass (2).

        Sequence parallelism gathers twice and scatters twice in each pass, and gathers twice more
        for weight gradients, if there are any. Keys and values are gathered in both passes, and
        their gradients are scattered. In each pass, tokens are dispatched to their experts and
        combined.
        """
        parts, shape = self.parts, self.shape
        traffic = Traffic(parts, self.device)
        tokens = pack.tokens / parts.context
        hidden = 2 * tokens * shape.hidden_size
        keys = 4 * max(shape.sizes["key"] / parts.tensor, shape.head_dim) * pack.tokens
        number = 4 if calls == 1 or parts.lora_rank else 6
        seconds = traffic.tensor(number * hidden, number) + traffic.context(calls * keys, calls)
        if shape.num_query_groups < parts.tensor:  # queries, keys and values are gathered
            merged = 2 * tokens * (shape.sizes["query"] + 2 * shape.sizes["key"])
            seconds += traffic.tensor(merged, 1)
        if shape.experts is not None:
            copies = hidden * shape.experts.experts_per_token
            seconds += traffic.expert(2 * copies / parts.tensor, 4)
            slices = parts.expert_slices
            seconds += traffic.expert_tensor(2 * copies * slices / parts.tensor, 2)
        return seconds

    def _head(self, pack: Packs, *, backward: bool) -> float:
        """Estimate log-probs in tiles; the backward pass recomputes the logits."""
        parts, shape = self.parts, self.shape
        logits = pack.tokens / parts.context * shape.vocab_size / parts.tensor
        products = 2 * shape.hidden_size * logits
        seconds = self._matmul(products) + self._move(20 * logits)
        if backward:
            factor = 2 if parts.lora_rank else 3  # logits, hidden states and weights
            seconds += self._matmul(factor * products) + self._move(30 * logits)
        return seconds

    def _optimizer(self) -> float:
        """Estimate zeroing the gradients, their norm, and Adam on this rank's shard."""
        parameters = count_trained(self.shape, self.parts, stage=0)
        awake, asleep = state_bytes(self.shape, self.parts, stage=0)
        shard = (awake - asleep - GRADIENT * parameters.total) / OPTIMIZER
        return self._move(2 * GRADIENT * parameters.total + (2 * OPTIMIZER + 2 * GRADIENT) * shard)


def _latent_weights(shape: ModelShape) -> int:
    """Count the weights of latent attention that are used per token."""
    names = ("linear_down_proj.", "linear_q_up_proj.", "linear_kv_up_proj.", "linear_proj.")
    linears = [weight for weight in shape.weights if any(n in weight.megatron for n in names)]
    return sum(math.prod(s) for weight in linears for s in weight_shapes(weight, shape=shape))
