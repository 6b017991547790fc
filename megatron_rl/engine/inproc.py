"""A vLLM weight transfer backend for a trainer in the same process, without copies in between.

vLLM loads the tensors like a checkpoint, layer by layer
(vllm/model_executor/model_loader/reload/layerwise.py): its loaders slice and merge them, its
post-processing repacks for the CPU or quantizes. vLLM accepts a checkpoint with missing weights
silently, so this backend checks that every parameter was loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
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
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

BACKEND = "megatron_rl_inproc"


@dataclass
class InprocInitInfo(WeightTransferInitInfo):
    """Empty: there is no connection to open."""


@dataclass
class InprocUpdateInfo(WeightTransferUpdateInfo):
    """One update: all weights of the model in full shape, by their HF names."""

    weights: Iterator[tuple[str, Tensor]]
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of vLLM's parameters
    tied_embeddings: bool = False


class InprocTransferEngine(WeightTransferEngine[InprocInitInfo, InprocUpdateInfo]):
    """Receiver of an iterator of HF tensors from its own process."""

    init_info_cls = InprocInitInfo
    update_info_cls = InprocUpdateInfo

    def init_transfer_engine(self, init_info: InprocInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Return the model to its state before loading."""
        if self.device.type == "cpu":
            _remove_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: InprocUpdateInfo) -> None:
        """Load all weights; raise ValueError if parameters are not as expected or not loaded."""
        try:
            self._load(update_info)
        except BaseException:
            # Otherwise the weights loaded so far would count towards the layers of the next
            # update, which would then be finished before all of their weights have arrived.
            self.finish_weight_update()
            raise

    def _load(self, update_info: InprocUpdateInfo) -> None:
        # Between start and finish the parameters have the shapes in which vLLM loads them; at
        # other times those repacked on CPU are empty.
        actual = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        expected, weights = dict(update_info.expected), update_info.weights
        if update_info.tied_embeddings and "lm_head.weight" in actual:
            weights = self._with_output_layer(weights)
        elif update_info.tied_embeddings:  # in earlier releases the same parameter
            expected.pop("lm_head.weight", None)
        _compare_parameters(actual, expected)
        loaded = set(self.model.load_weights(self._with_sinks(weights)))
        # The names of loaded experts that earlier releases return lack one module.
        loaded |= {name.replace(".experts.", ".experts.routed_experts.") for name in loaded}
        if update_info.tied_embeddings:
            loaded.add("lm_head.weight")
        # A parameter that two modules share is listed once, and loaded once.
        missing = (set(actual) - loaded) | (set(actual) & set(self._never_loaded()))
        if missing:
            raise ValueError(f"vLLM loaded no weights into {sorted(missing)}")

    def _never_loaded(self) -> Iterator[str]:
        """Yield parameters of modules none of whose loaders was called, whatever vLLM returned.

        Between start and finish parameters have no memory, and only their loaders keep what is
        loaded: after a plain copy into one, finishing restores the values of the update before.
        """
        for place, module in self.model.named_modules():
            info = get_layerwise_info(module)
            if info.can_load() and not info.loaded_weights:  # a shard of padding loads nothing
                for name, _ in module.named_parameters(prefix=place, recurse=False):
                    yield name

    def _with_sinks(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Call the loaders of attention sinks, which vLLM's `load_weights` of gpt-oss bypasses."""
        for name, tensor in weights:
            if name.endswith(".self_attn.sinks"):
                sinks = self.model.get_parameter(name.replace(".self_attn.", ".attn."))
                first = len(sinks) * get_tensor_model_parallel_rank()
                sinks.weight_loader(sinks, tensor.narrow(0, first, len(sinks)))
            yield name, tensor

    def _with_output_layer(
        self, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Also load the embedding into the tied output layer.

        vLLM's `load_weights` skips it, since both share memory. But on CPU the output layer
        computes with a repacked copy, which would keep the values of the previous update.
        """
        output_layer = self.model.get_parameter("lm_head.weight")
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                output_layer.weight_loader(output_layer, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Post-process the loaded weights (repack, quantize)."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Not supported; releases up to 0.27 require the method."""
        raise NotImplementedError("weights are passed within this process: use VllmEngine.receive")


def _remove_expert_kernels(model: torch.nn.Module) -> None:
    """Remove vLLM's expert kernels so that it sets them up again, which on CPU repacks the weights.

    With a kernel in place vLLM keeps an update's weights as they are, although the kernel computes
    with repacked ones (`_setup_kernel` in vllm's unquantized_fused_moe_method.py).
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _compare_parameters(
    actual: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    problems = [f"{name} {actual[name]} is not expected" for name in actual.keys() - expected]
    problems += [f"{name} {expected[name]} does not exist" for name in expected.keys() - actual]
    problems += [
        f"{name} has shape {actual[name]}, expected {expected[name]}"
        for name in actual.keys() & expected
        if actual[name] != expected[name]
    ]
    if problems:
        raise ValueError(
            "vLLM's parameters differ from those expected: " + "; ".join(sorted(problems))
        )


@contextmanager
def own_shared_memory(token: str) -> Iterator[None]:
    """Give vLLM's shared memory on CPU a name unique to this run; construct vLLM in this block.

    vLLM names it by the ranks only (`_CPUSHMDistributed.make_group_name`): two runs on one machine
    would share it, and the remains of a killed run would prevent every later one from starting.
    The names are removed once all ranks have attached; the memory stays.
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
    dist.barrier()  # not after an error: the other ranks would never arrive
    for path in Path("/dev/shm").glob(f"*{token}*"):
        path.unlink(missing_ok=True)


def register() -> None:
    """Register `BACKEND` with vLLM, once per process."""
    registered: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registered:
        WeightTransferEngineFactory.register_engine(BACKEND, InprocTransferEngine)
