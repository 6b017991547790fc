"""Digest of a rank's part of a policy: weights, main weights and Adam's moments."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core import package_info
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.memory import main_parameters, optimizer_parts
from megatron_rl.distributed.topology import Topology

# Elements per block: few enough for a CPU's cache, enough to keep a GPU busy.
BLOCK = {"cpu": 1 << 15, "cuda": 1 << 22}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def digest_tensors(tensors: Iterable[Tensor], *, device: torch.device | None = None) -> str:
    """Hash the bits and order of all elements to 16 hexadecimal digits.

    The hash is the sum of bit patterns times their positions modulo 2^64. It does not depend on the
    device and is computed on `device`, wherever the tensors are (for an offloaded optimizer, the
    actor's GPU is far faster than the CPU).
    """
    device = device or torch.device("cpu")
    step = BLOCK[device.type]
    factors = 2 * torch.arange(1, step + 1, device=device) + 1  # odd factors lose no bit
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        for start in range(0, len(bits), step):
            block = bits[start : start + step].to(device, non_blocking=True).long()
            # Element n has factor 2 (n + 1) + 1; products and sums wrap around.
            total += (block * factors[: len(block)]).sum() + 2 * start * block.sum()
    return f"{int(total) % 2**64:016x}"


def training_state(parameters: Iterable[Tensor], optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield this rank's parameters, then its optimizer shard's main weights and moments."""
    yield from parameters
    for part in optimizer_parts(optimizer):
        yield from main_parameters(part)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                yield from (state[name] for name in _MOMENTS if name in state)


def describe_layout(sizes: Topology, config: TransformerConfig, dtype: torch.dtype) -> str:
    """Describe everything that determines the tensors of a rank and the rounding of products."""
    stages = "" if sizes.stage_layers is None else f" layers {sizes.stage_layers}"
    slices = "" if sizes.expert_tp_size in (None, sizes.tp_size) else f"x{sizes.expert_tp_size}"
    return (
        f"tp{sizes.tp_size} pp{sizes.pp_size}x{sizes.virtual_stages}{stages} cp{sizes.cp_size} "
        f"dp{sizes.dp_size} ep{sizes.ep_size}{slices} {config.transformer_impl} "
        f"{dtype} megatron-core {package_info.__shortversion__}"
    )
