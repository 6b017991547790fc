"""Megatron shards cut from Hugging Face tensors: a source of weights without Megatron."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import padded_vocabulary, parameter_shapes


@dataclass
class CutShards:
    """A WeightSource with the shards of a Megatron rank."""

    shape: ModelShape
    topology: Topology
    parameters: dict[str, Tensor]

    def named_parameters_local(self) -> dict[str, Tensor]:
        return self.parameters


def topology_of(layout: ActorLayout, *, rank: int) -> Topology:
    """Return this rank's topology in `layout`, without process groups."""
    return Topology(
        world_size=layout.world_size,
        rank=rank,
        tp_size=layout.tensor,
        pp_size=layout.pipeline,
        cp_size=layout.context,
        dp_size=layout.data,
        ep_size=layout.expert,
        expert_tp_size=layout.expert_tensor,
        virtual_stages=layout.virtual,
        stage_layers=layout.stage_layers,
    )


def cut_shards(
    tensors: dict[str, Tensor], *, shape: ModelShape, layout: ActorLayout, rank: int
) -> CutShards:
    """Return the shards of `rank` of `layout` from HF `tensors`; vocabulary padding is NaN."""
    pieces = layout.pieces(shape, rank=rank)
    sizes = parameter_shapes(pieces)
    padded = padded_vocabulary(shape.vocab_size, tp_size=layout.tensor) // layout.tensor
    parameters: dict[str, Tensor] = {}
    for piece in pieces:
        name, (height, width) = piece.parameter, sizes[piece.parameter]
        if name not in parameters:
            is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            size = (padded if is_vocabulary else height, width)
            vector = tensors[piece.tensor].dim() == 1
            parameters[name] = torch.full(size[:1] if vector else size, torch.nan)
        piece.of_parameter(parameters[name]).copy_(piece.of_tensor(tensors[piece.tensor]))
    return CutShards(shape, topology_of(layout, rank=rank), parameters)
