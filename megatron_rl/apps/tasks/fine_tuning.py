"""Fine-tuning of small models: a randomly initialized Qwen2, and one update of it."""

from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100  # label of an untrained position, as in torch's cross entropy


class ModelSize(Protocol):
    """Settings that determine the size of a model."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...


def build_model(settings: ModelSize, tokenizer: Any, max_length: int) -> Any:
    """Build a randomly initialized Qwen2 of the size in `settings`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**model_sizes(settings, tokenizer, max_length)))


def model_sizes(settings: ModelSize, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Return the config of a model of this size, as keyword arguments of its config class."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "intermediate_size": 3 * settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": max_length,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def update(
    model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, gap: int = 0
) -> float:
    """Run one optimizer step; return the batch mean of a solution's negative log-prob.

    `gap` positions are skipped between question and solution.
    """
    in_solution = (labels != IGNORED).cumsum(1) > 0
    positions = torch.arange(tokens.shape[1]) + gap * in_solution
    # Padding is on the right, so causal attention needs no mask; but without a mask, transformers
    # interprets a jump in the positions as the start of another sequence.
    output = model.model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        position_ids=positions,
        use_cache=False,
    )
    trained = labels[:, 1:] != IGNORED
    logits = model.lm_head(output.last_hidden_state[:, :-1][trained])
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][trained])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() * trained.sum().item() / len(tokens)
