"""Updates of a small model on worked solutions with transformers, for the tiny models of tasks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The same rounding on every x86-64 processor with AVX2, so that equal settings produce equal
# models. Libraries read these variables when they are loaded.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}
IGNORED = -100  # label of an untrained position, as in torch's cross entropy


def update(
    model: Any, optimizer: "torch.optim.Optimizer", tokens: Any, labels: Any, gap: int = 0
) -> float:
    """Run one optimizer step; return the batch mean of a solution's negative log-prob.

    `gap` positions are skipped between question and solution.
    """
    import torch

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
