"""The gated delta rule by flash-linear-attention's Triton kernels, on CUDA.

Its public call computes everything that `distributed/gated_delta.py` needs of a rule: sequences of
any length, an initial state, the final state, and gradients of both. Key heads are not repeated.
Source: github.com/fla-org/flash-linear-attention, fla/ops/gated_delta_rule/chunk.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from megatron_rl.distributed.gated_delta import Rule, torch_rule
from megatron_rl.distributed.sequence_layout import SequenceLayout

PACKAGE = "flash-linear-attention"


def find_kernel() -> Callable[..., Any]:
    """Return the package's function.

    Raises ImportError, with the cure, where it or what it needs is not installed. On Hopper it
    refuses gradients with Triton 3.4.0 to 3.7.0, which miscompile them, unless tilelang computes
    them; source: `chunk_bwd_dqkwg` of the package's fla/ops/common/chunk_o.py.
    """
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(f"{PACKAGE} is not installed: `pip install {PACKAGE}`") from error
    if torch.cuda.get_device_capability() == (9, 0) and not importlib.util.find_spec("tilelang"):
        release = importlib.metadata.version("triton")
        if Version("3.4.0") <= Version(release) < Version("3.7.1"):
            raise ImportError(
                f"{PACKAGE} refuses gradients on Hopper with Triton {release}: "
                "`pip install tilelang`, or Triton 3.7.1 or later"
            )
    return kernel


def choose_rule(*, on_cuda: bool) -> Rule:
    """Return the kernel's rule on CUDA, and torch's on a CPU or, with a warning, without it."""
    if not on_cuda:
        return torch_rule
    try:
        return kernel_rule(find_kernel())
    except ImportError as error:
        warnings.warn(
            f"gated delta nets are scanned in torch, which computes the same several times slower: "
            f"{error}",
            stacklevel=2,
        )
        return torch_rule


def kernel_rule(kernel: Callable[..., Any]) -> Rule:
    """Return the rule that calls this function."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        before: Tensor | None,
        layout: SequenceLayout,
    ) -> tuple[Tensor, Tensor]:
        out, after = kernel(
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            scale=q.shape[-1] ** -0.5,
            initial_state=before,
            output_final_state=before is not None,
            cu_seqlens=layout.once(_chunk_ends),
        )
        return out[0], after

    return rule


def _chunk_ends(layout: SequenceLayout) -> Tensor:
    """Return the ends of this rank's chunks, from 0; int64 [n + 1].

    With cp_size 1 a sequence is one chunk, and its empty late chunk is left out.
    """
    ends = layout.chunk_bounds[1]
    ends = ends[::2] if layout.cp_size == 1 else ends
    return torch.cat((ends.new_zeros(1), ends)).long()
