"""The critic: a model with a value head, trained like the policy and scored on its packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.model import HeadOutputs, ModelInput, PolicyModel
from megatron_rl.actor.packs import LocalPack, gather_packs
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.training import TrainedModel, Update
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import read_critic_shape
from megatron_rl.objectives.values import (
    GaeSettings,
    ValueStatistics,
    compute_targets,
    value_loss,
)
from megatron_rl.types import Minibatch, TokenBatch


class ValueModel(PolicyModel):
    """One model chunk of the critic: the policy's with a linear map to one value as its head.

    The head is the same on all tensor-parallel ranks and begins at zero, so that a critic's first
    values are 0 whatever the model.
    """

    trained_beside_adapters = ("output_layer.weight",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            config = self.config
            head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            torch.nn.init.zeros_(head.weight)
            self.output_layer = head  # the name under which Megatron saves it

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or train all weights but the head's, which is trained next to adapters, too."""
        super().requires_grad_(requires_grad)
        if self.post_process:
            self.output_layer.requires_grad_(True)
        return self

    def announce_head_gradient(self) -> None:
        """Do nothing: autograd computes the gradient of this head."""

    def _run_head(self, hidden: Tensor, inputs: ModelInput, *_: Any) -> Tensor:
        """Compute values in float32, 0 off the mask; [t / tp, 1, h] -> [1, t]."""
        if self.config.sequence_parallel:
            # Every rank computes all values, so that each has the whole gradient.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.vocab_shard.group
            )
        hidden = hidden.squeeze(1).index_select(0, inputs.response_positions)
        values = hidden.float() @ self.output_layer.weight.float()[0]
        full = values.new_zeros(1, inputs.tokens.shape[1])
        return full.index_copy(1, inputs.response_positions, values[None])


class Critic(TrainedModel):
    """A critic in Megatron-core under the policy's layout; every rank has one.

    model_folder: a Hugging Face folder of any supported architecture and size, with the policy's
    tokenizer. Its output layer is not read; its value head is (`read_critic_shape`).
    """

    model_class = ValueModel
    update_routing = "own"  # the routes of packs are the policy's

    def __init__(
        self,
        model_folder: str | Path,
        *,
        topology: Topology,
        settings: ActorSettings,
        on_micro_batch: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(
            model_folder,
            shape=read_critic_shape(model_folder),
            topology=topology,
            settings=replace(settings, replay_routes=False),
            on_micro_batch=on_micro_batch,
        )

    def sleep(self) -> None:
        """Offload weights too, on a device: the policy needs its memory. On a CPU, see the base."""
        super().sleep()
        if self.topology.device.type == "cuda":
            self._move_weights(to_host=True)

    def wake_up(self) -> None:
        """Bring weights and optimizer states back."""
        if self.topology.device.type == "cuda":
            self._move_weights(to_host=False)
        super().wake_up()

    def _move_weights(self, *, to_host: bool) -> None:
        """Empty the buffers that hold the weights, or fill them again; views stay valid."""
        with megatron_runtime():
            for chunk in self.ddp_chunks:
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                    if to_host:
                        buffer.offload_to_cpu(move_params=True, move_grads=False)
                    else:
                        buffer.reload_from_cpu(move_params=True, move_grads=False)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint; `folder` appears only when complete. Collective."""
        with self._weights_on_device():
            super().save(folder)

    def digest(self) -> dict[str, str]:
        """Return this rank's layout and its state's digest, comparable between equal layouts."""
        with self._weights_on_device():
            return super().digest()

    def check_weights(self) -> None:
        """Raise FloatingPointError if any of this rank's parameters is not finite."""
        with self._weights_on_device():
            super().check_weights()

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Have the weights on the device inside the block, also of a sleeping critic."""
        moves = self.asleep and self.topology.device.type == "cuda"
        if moves:
            self._move_weights(to_host=False)
        try:
            yield
        finally:
            if moves:
                self._move_weights(to_host=True)

    def compute_targets(
        self,
        micro_batches: Sequence[TokenBatch],
        rewards: Sequence[Tensor],
        ends: Sequence[Tensor],
        cut: Sequence[Tensor],
        *,
        settings: GaeSettings,
    ) -> list[Tensor]:
        """Compute values, advantages and targets of each pack; [T, 3], 0 off the mask. Collective.

        rewards: [T] of each pack. ends: [T], True at the last token of each turn. cut: [R], True
        for responses that the limit of length cut. Values that packs have already are kept.
        """
        self._check(micro_batches)
        with megatron_runtime(), torch.no_grad():
            values = self._values(micro_batches)
            packs = [self.packs.prepare(batch) for batch in micro_batches]
            local = []
            for index, own in enumerate(values):  # none on stages before the last one
                pack = packs[index]
                targets = compute_targets(
                    pack.layout,
                    own,
                    pack.shard(rewards[index]),
                    ends=pack.shard(ends[index]),
                    cut=pack.spread(cut[index]),
                    settings=settings,
                )
                local.append(torch.stack((own, targets.advantages, targets.returns)))
        layouts = [pack.layout for pack in packs]
        return gather_packs(layouts, local, rows=3, topology=self.topology)

    def _values(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Values of this rank's tokens, [t] each; none on stages before the last one."""
        known = [batch.values for batch in micro_batches]
        if any(one is None for one in known):
            values = self._run(
                micro_batches,
                _keep_values,
                forward_only=True,
                outputs=HeadOutputs(),
                routing=self.update_routing,
            )
            return values[: len(micro_batches)]
        if not self.topology.is_last_stage:
            return []
        pairs = zip(micro_batches, known, strict=True)
        return [self.packs.prepare(batch).shard(one) for batch, one in pairs if one is not None]

    def update(self, minibatch: Minibatch, *, clip: float | None) -> Update[ValueStatistics]:
        """Run one optimizer update of the value loss on the minibatch's targets. Collective."""
        self._check(minibatch.micro_batches)
        result, _ = self._take_update(
            minibatch.micro_batches,
            partial(self._value_loss, minibatch, clip),
            outputs=HeadOutputs(),
            reduce=self._reduce,
        )
        return result

    def _value_loss(
        self,
        minibatch: Minibatch,
        clip: float | None,
        batch: TokenBatch,
        pack: LocalPack,
        output: Tensor,
    ) -> tuple[Tensor, ValueStatistics]:
        assert batch.values is not None and batch.returns is not None, "compute targets first"
        return value_loss(
            output[0],
            pack.shard(batch.values),
            pack.shard(batch.returns),
            clip=clip,
            layout=pack.layout,
            denominators=minibatch.denominators,
        )

    def _reduce(self, reports: Sequence[ValueStatistics]) -> ValueStatistics:
        topology = self.topology
        total = ValueStatistics.empty(topology.device)
        if topology.is_last_stage:
            total = reduce(ValueStatistics.merge, reports, total).all_reduce(topology.dp_cp_group)
        if topology.pp_size > 1:
            dist.broadcast(total.sums, group=topology.pp_group, group_src=topology.pp_size - 1)
        return total


def _keep_values(batch: TokenBatch, pack: LocalPack, output: Tensor) -> tuple[Tensor, Tensor]:
    """Report the values; [t]."""
    return output[0], output[0]
