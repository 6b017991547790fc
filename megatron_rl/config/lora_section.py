"""Section of a config for training low-rank adapters (`docs/lora.md`)."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from megatron_rl.config.paths import PathText
from megatron_rl.config.sections import Count, Positive, Section

Target = Literal["qkv", "proj", "fc1", "fc2"]


def _refuse_dropout(value: Any) -> Any:
    if value != 0:
        raise ValueError(
            "must be 0: the same weights must give the same log-probs in scoring and in training"
        )
    return value


class LoraSection(Section):
    """LoRA: train low-rank adapters and keep the model's weights frozen (`docs/lora.md`)."""

    rank: Count = 32
    """Rank r of the adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters: a weight is used as W + alpha / rank * B A."""
    targets: list[Target] = Field(default_factory=lambda: list(get_args(Target)), min_length=1)
    """Linears with an adapter: of attention `qkv` and `proj` (output), of MLPs and experts `fc1`
    (gate and up) and `fc2` (down)."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """Distribution of A at the start: `uniform` within 1 / sqrt(inputs), or `gaussian` with
    standard deviation 1 / rank. B starts at 0."""
    path: PathText | None = None
    """Folder of the `peft` library (adapter_config.json, adapter_model.safetensors), such as
    `RUN/adapter`, from whose adapters training starts; `null`: from the model alone."""
    push: Literal["merged", "adapters"] = "merged"
    """Weights that the engine receives: W with its update (`merged`), or W once and then adapters
    alone, with which vLLM computes itself (`adapters`)."""
    dropout: Annotated[float, BeforeValidator(_refuse_dropout)] = 0.0
    """Dropout of the adapters' inputs; only 0 is supported."""

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: list[Target]) -> list[Target]:
        if len(set(value)) < len(value):
            raise ValueError("lists a linear twice; list each once")
        return value


def lora_problems(config: Any) -> list[str]:
    """List conflicts of `config.lora` with other sections of a `Config`."""
    if config.lora is None:
        return []
    problems = []
    if config.model.fp8:
        problems.append(
            f"model.fp8={config.model.fp8} cannot be combined with lora, whose adapters have not "
            "been tried with products in fp8; unset model.fp8"
        )
    if "learning_rate" not in config.optimizer.model_fields_set:
        problems.append(
            f"lora needs a learning rate of its own: optimizer.learning_rate="
            f"{config.optimizer.learning_rate:g} is the default for all weights, and adapters need "
            "10 to 100 times as much; set it"
        )
    return problems
