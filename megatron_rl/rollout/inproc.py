"""A vLLM weight transfer backend for a trainer in the same process: tensors are handed over as is.

vLLM loads what it is given as it would load a checkpoint, layer by layer
(vllm/model_executor/model_loader/reload/layerwise.py): its own loaders cut and merge, its own
post-processing repacks for the CPU or quantizes. That accepts a checkpoint with missing weights
silently, so this backend compares.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "megatron_rl_inproc"


@dataclass
class InprocInitInfo(WeightTransferInitInfo):
    """Nothing to connect."""


@dataclass
class InprocUpdateInfo(WeightTransferUpdateInfo):
    """One update: all weights of the model, by their HF names and in full shape."""

    weights: Iterator[tuple[str, Tensor]]
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)  # vLLM's own, by name
    tied_embeddings: bool = False


class InprocTransferEngine(WeightTransferEngine[InprocInitInfo, InprocUpdateInfo]):
    """Receives an iterator of HF tensors from the process it lives in."""

    init_info_cls = InprocInitInfo
    update_info_cls = InprocUpdateInfo

    def init_transfer_engine(self, init_info: InprocInitInfo) -> None:
        """There is no connection."""

    def start_weight_update(self) -> None:
        """Put the model into the state in which it was built, ready to load."""
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: InprocUpdateInfo) -> None:
        """Load all weights; ValueError if parameters differ from `expected` or are left over."""
        try:
            self._load(update_info)
        except BaseException:
            # What was loaded so far would otherwise count towards the next update's layers, which
            # would then be finished before all of their weights are there.
            self.finish_weight_update()
            raise

    def _load(self, update_info: InprocUpdateInfo) -> None:
        # Between start and finish the parameters have the shapes in which vLLM loads them; on CPU
        # the repacked ones are empty otherwise.
        found = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        expected, weights = dict(update_info.expected), update_info.weights
        if update_info.tied_embeddings and "lm_head.weight" in found:
            weights = self._with_output_layer(weights)
        elif update_info.tied_embeddings:  # in earlier releases it is the embedding
            expected.pop("lm_head.weight", None)
        _compare_parameters(found, expected)
        loaded = set(self.model.load_weights(weights))
        # Earlier releases leave a module out where they say which experts they have loaded.
        loaded |= {name.replace(".experts.", ".experts.routed_experts.") for name in loaded}
        if update_info.tied_embeddings:
            loaded.add("lm_head.weight")
        if missing := sorted(set(found) - loaded):
            raise ValueError(f"vLLM loaded no weights into {missing}")

    def _with_output_layer(
        self, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Load the embedding into the tied output layer too.

        vLLM's `load_weights` skips it, since both share one memory. But on CPU the output layer
        computes with a repacked copy, which would keep the values of the update before.
        """
        output_layer = self.model.get_parameter("lm_head.weight")
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                output_layer.weight_loader(output_layer, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Post-process what was loaded (repack, quantize)."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Releases up to 0.27 want it; nothing is sent where the trainer lives here too."""
        raise NotImplementedError("weights are handed over in this process: VllmEngine.receive")


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let vLLM set up its kernels for experts anew, which on CPU is what repacks the weights.

    With a kernel in place it takes an update's weights as they are, though the kernel computes with
    repacked ones (`_setup_kernel` in vllm's unquantized_fused_moe_method.py).
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _compare_parameters(
    found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    problems = [f"{name} {found[name]} is unknown to the table" for name in found.keys() - expected]
    problems += [f"{name} {expected[name]} does not exist" for name in expected.keys() - found]
    problems += [
        f"{name} has shape {found[name]}, the table says {expected[name]}"
        for name in found.keys() & expected
        if found[name] != expected[name]
    ]
    if problems:
        raise ValueError("vLLM's parameters are not those expected: " + "; ".join(sorted(problems)))


@contextmanager
def own_shared_memory(token: str) -> Iterator[None]:
    """Construct vLLM inside this block: its shared memory on CPU gets a name of this run's own.

    vLLM names it by the ranks alone (`_CPUSHMDistributed.make_group_name`): two runs on one
    machine would share it, and what a killed run left behind would keep every later one from
    starting. Names are removed once all ranks have attached; the memory stays.
    token: the same on all ranks, different for every run.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{token}-{original(communicator).replace('/', '')}"
    )
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
    dist.barrier()  # not after an error: the other ranks would never come
    for path in Path("/dev/shm").glob(f"*{token}*"):
        path.unlink(missing_ok=True)


def register() -> None:
    """Make `BACKEND` known to vLLM, once per process."""
    registered: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registered:
        WeightTransferEngineFactory.register_engine(BACKEND, InprocTransferEngine)
