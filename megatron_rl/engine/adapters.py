"""Adapters (LoRA) that vLLM computes with itself: base weights once, then only factors A and B.

Every weight sync adds a version of the adapters to vLLM, in memory, and every request names its
version. vLLM asks for versions that it does not have through `_load_adapter`, which reads a folder
there and refuses here: a request never runs with the base weights, or another version, instead.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.incoming import check_tensors
from megatron_rl.models.adapters import engine_modules, slot_rank
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.models.weights import Factors
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.push import (
    EnginesElsewhere,
    Resharder,
    SyncStats,
    WeightReceiver,
    WeightSource,
)


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters that the engine computes with.

    versions: how many the engine has at the same time; the oldest version makes room for a new
    version.
    """

    lora: LoraSection
    versions: int = 1


class AdapterSource(WeightSource, Protocol):
    """A source of weights with adapters, such as the actor."""

    def push_sources(self) -> tuple[WeightSource, WeightSource]:
        """Return the frozen weights, and the factors as weights of a model of their own."""
        ...


class Host(WeightReceiver, Protocol):
    """The engine that adapters are part of; it receives the base weights."""

    shape: ModelShape
    topology: Topology


@dataclass
class AdapterResharder:
    """Repeated transfers of factors, before the first of which the base weights are transferred.

    base: of the engine that adapters are part of.
    """

    base: Resharder
    factors: Resharder
    has_base: bool = False

    @classmethod
    def beside(
        cls, base: Resharder, receiver: WeightReceiver | EnginesElsewhere
    ) -> "AdapterResharder":
        """Build from the base's resharder and the receiver of factors.

        Factors are small, so every slice of every push is checked.
        """
        factors = Resharder(
            receiver, base.settings, base.ranks_per_node, base.link, full_check_every=1
        )
        return cls(base, factors)

    def push(self, source: WeightSource, *, version: int) -> SyncStats:
        """Transfer the factors, and the base weights if the engine lacks them. Collective.

        Raises on every rank, as `Resharder.push` does; the engine then refuses to generate.
        """
        base, factors = cast(AdapterSource, source).push_sources()
        if self.has_base:
            return self.factors.push(factors, version=version)
        # One of its own: its memory is released.
        first = replace(self.base).push(base, version=version)
        self.has_base = True
        return first + self.factors.push(factors, version=version)


def factor_layout(base: EngineLayout) -> EngineLayout:
    """Return the layout of engines that receive whole factors, which vLLM cuts itself."""
    return EngineLayout(1, base.world_size, first=base.first)


class EngineAdapters:
    """The adapters of one engine rank, and the receiver of their factors; an `EngineFeature`."""

    def __init__(self, host: Host, settings: AdapterSettings, resharder: Resharder) -> None:
        self._host, self.settings = host, settings
        self.layout, self.dtype, lora = factor_layout(host.layout), host.dtype, settings.lora
        self.resharder = AdapterResharder.beside(resharder, self)
        self.shape = replace(host.shape, factors=Factors(lora.rank, tuple(lora.targets)))
        self._pieces: dict[str, list[Piece]] = {}
        rank = host.layout.first + host.topology.rank
        for piece in host.layout.pieces(self.shape, rank=rank):
            self._pieces.setdefault(piece.parameter, []).append(piece)
        self._llm: Any = None
        self._sent: list[int] = []  # versions in the order of their arrival
        self._arrived: Any = None  # vllm.lora.lora_model.LoRAModel

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments: slots for the versions, and the modules that have adapters."""
        lora, versions = self.settings.lora, self.settings.versions
        return {
            "enable_lora": True, "max_loras": versions, "max_cpu_loras": versions,
            "max_lora_rank": slot_rank(lora.rank),
            "lora_target_modules": engine_modules(self._host.shape, lora.targets),
        }  # fmt: skip

    def start(self, llm: Any) -> None:
        """Begin; raises RuntimeError if vLLM has adapters on other modules than the actor."""
        self._llm = llm
        (self._worker,) = llm.collective_rpc(lambda worker: worker.model_runner.lora_manager)
        self._worker._load_adapter = self._load_adapter
        self._manager: Any = self._worker._adapter_manager
        ours = {name.rpartition(".")[0] for name in self._pieces}
        if ours != set(self._manager.modules):
            raise RuntimeError(
                f"vLLM has adapters on other modules than the actor: "
                f"{sorted(ours ^ set(self._manager.modules))}; set lora.push to merged"
            )

    def request(self, version: int) -> Any:
        """Return vLLM's LoRARequest; prefixes are cached by its name, so each version has one."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"version {version}", version + 1, "in memory")

    def require(self, version: int) -> None:
        """Raise RuntimeError unless the engine has the adapters of this version."""
        if version + 1 not in self._manager.lora_index_to_id:
            raise RuntimeError(self._lacks(version))

    def _lacks(self, version: int) -> str:
        versions = sorted(one - 1 for one in self._manager.lora_index_to_id if one is not None)
        return (
            f"the engine has no adapters of weight version {version}, only of {versions}, and does "
            "not generate without them; sync weights first"
        )

    def check_idle(self) -> None:
        self._host.check_idle()

    def live_parameters(self) -> None:
        """Return None: factors are copied into vLLM's slots by vLLM."""

    def invalidate(self) -> None:
        self._host.invalidate()

    def overwrite(self, write: Callable[[], object], *, version: int) -> float:
        return self._host.overwrite(write, version=version)

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Add a version from full factors, by the names of `models/weights.py`.

        Raises ValueError for a missing or extra factor, RuntimeError if vLLM has other values
        afterwards than those that arrived.
        """

        def add() -> None:
            factors = {
                name: self._scaled(name, tensor).to("cpu", copy=True)
                for name, tensor in check_tensors(weights, self.shape)
            }
            self._make_room(version)
            self._arrived = self._build(factors, version)
            try:
                self._llm.llm_engine.add_lora(self.request(version))
            finally:
                self._arrived = None
            self._compare(factors, version)

        return self._host.overwrite(add, version=version)

    def _scaled(self, name: str, factor: Tensor) -> Tensor:
        """Return B times the scale, rounded once, and A as it is."""
        if name.endswith("lora_A.weight"):
            return factor
        return (factor.float() * self.settings.lora.scale).to(self.dtype)

    def _make_room(self, version: int) -> None:
        """Remove this version, if it was sent before, or the one sent first if no slot is free."""
        if version in self._sent:
            self._remove(version)
        elif len(self._sent) == self.settings.versions:
            self._remove(self._sent[0])
        self._sent.append(version)

    def _remove(self, version: int) -> None:
        self._sent.remove(version)
        self._worker.remove_adapter(version + 1)

    def _build(self, factors: Mapping[str, Tensor], version: int) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        rank, layers = self.settings.lora.rank, {}
        for weight in self.shape.weights:
            if not weight.megatron.endswith("lora_b"):
                continue
            for layer in self.shape.layers_with(weight.layers):
                names = [name.format(layer=layer) for name in weight.hf]
                a = factors[names[0].replace("lora_B", "lora_A")]
                for name in names:
                    module = name.removesuffix(".lora_B.weight")
                    layers[module] = LoRALayerWeights(module, rank, rank, a, factors[name], 1.0)
        return LoRAModel(version + 1, rank, layers)

    def _load_adapter(self, request: Any) -> Any:
        """Return the adapter that has arrived; in the place of vLLM's reading of a folder."""
        if self._arrived is None or self._arrived.id != request.lora_int_id:
            raise RuntimeError(self._lacks(request.lora_int_id - 1))
        return self._arrived

    def _compare(self, factors: Mapping[str, Tensor], version: int) -> None:
        """Raise RuntimeError naming factors that vLLM does not have in the version's slot."""
        self.require(version)
        slot = self._manager.lora_index_to_id.index(version + 1)
        wrong = []
        for parameter, pieces in self._pieces.items():
            module, _, factor = parameter.rpartition(".")
            stacked = getattr(self._manager.modules[module], f"{factor}_stacked")
            held = [each[slot, 0] for each in stacked]
            # q, k and v, or gate and up: each has the same A, and its own rows of B.
            for matrix in [torch.cat(held)] if factor == "lora_b" else held:
                expected = torch.zeros_like(matrix)
                for piece in pieces:
                    piece.of_parameter(expected).copy_(piece.of_tensor(factors[piece.tensor]))
                if not torch.equal(matrix, expected):
                    wrong.append(parameter)
        if wrong:
            raise RuntimeError(
                f"vLLM has other values than were sent of {sorted(set(wrong))[:8]}, weight version "
                f"{version}; of {len(tensor_shapes(self.shape))} factors"
            )
