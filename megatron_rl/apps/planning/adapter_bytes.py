"""Memory of an engine that computes with adapters itself (`lora.push: adapters`)."""

from megatron_rl.config import Config
from megatron_rl.models.adapters import count_adapter_parameters, slot_elements
from megatron_rl.models.shape import read_model_shape
from megatron_rl.trainer.actor_settings import build_adapter_settings


def slot_bytes(config: Config) -> dict[str, int]:
    """Return bytes of one engine rank's slots on the device, by name; empty without adapters."""
    settings = build_adapter_settings(config)
    if settings is None:
        return {}
    elements = slot_elements(
        read_model_shape(config.model.path), rank=settings.lora.rank, targets=settings.lora.targets,
        tensor=config.rollout.tensor,
    )  # fmt: skip
    return {f"{settings.versions} slots of adapters": _width(config) * settings.versions * elements}


def host_bytes(config: Config, *, engine: int) -> dict[str, int]:
    """Return bytes that one engine rank has on its host, by name; empty without adapters.

    engine: of what it computes with, which vLLM copies to the host while it sleeps (level 1).
    """
    settings = build_adapter_settings(config)
    if settings is None:
        return {}
    shape = read_model_shape(config.model.path)
    one = count_adapter_parameters(shape, rank=settings.lora.rank, targets=settings.lora.targets)
    return {
        "the sleeping engine's weights": engine,
        "adapters": _width(config) * settings.versions * one,
    }


def _width(config: Config) -> int:
    return 4 if config.trainer.dtype == "float32" else 2
