"""`transformer_engine_torch`, Transformer Engine's compiled module, in plain torch on the CPU.

Only what the actor's layers call in float32 and bfloat16: products, norms, attention inside the
sequences of a THD pack, what its context-parallel ring reads and merges, Adam. Anything else
raises NotImplementedError by its name. Signatures are those of csrc/extensions.h in the source of
transformer-engine-torch 2.11.0 and 2.20.2; the enums' names those of its pybind.cpp (2.20.2
compares some with its own).
"""

import enum
import itertools
import types

import torch

_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD "
    "THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD "
    "Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
_FORMATS = "BSHD SBHD THD SBHD_2BSHD BSHD_2SBHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET"
_MASKS = (
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
)
_ENUMS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "CommOverlapType": "RS AG",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
}
_NVTE_ENUMS = {  # their members begin with NVTE_ too
    "NVTE_Bias_Type": "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI",
    "NVTE_Mask_Type": _MASKS,
    "NVTE_Softmax_Type": "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": _FORMATS,
    "NVTE_QKV_Layout": _LAYOUTS,
    "NVTEScalingMode": "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D "
    "NVFP4_1D_SCALING INVALID_SCALING",
}
_BACKENDS = "F16_arbitrary_seqlen FP8 No_Backend"


def build(version: str) -> types.ModuleType:
    """The module as the Python of this release expects it."""
    module = types.ModuleType("transformer_engine_torch")
    backends = _BACKENDS if version >= "2.20" else f"F16_max512_seqlen {_BACKENDS}"
    nvte = {**_NVTE_ENUMS, "NVTE_Fused_Attn_Backend": backends}
    enums = _ENUMS | {
        name: " ".join(f"NVTE_{member}" for member in members.split())
        for name, members in nvte.items()
    }
    for name, members in enums.items():
        setattr(module, name, enum.IntEnum(name, members, start=0))
    for operation in OPERATIONS:
        setattr(module, operation.__name__, operation)
    module.get_cudnn_version = lambda: 92400
    module.get_cublasLt_version = lambda: 130100
    module.get_num_cublas_streams = lambda: 1
    module.multi_tensor_scale_tensor = multi_tensor_scale

    def add(name):
        """Any other name: a class, or a function that refuses to run."""
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(module, name, type(name, (), {}) if name[0].isupper() else _refusing(name))
        return getattr(module, name)

    module.__getattr__ = add
    return module


def _refusing(name: str):
    def call(*args, **kwargs):
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in on the CPU")

    return call


def _rows(x):
    return x.reshape(-1, x.shape[-1])


_TORCH_TYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
_CODES = {code: _TORCH_TYPES.get(n) for code, n in enumerate(_ENUMS["DType"].split())}


def _product(a, b, transa, transb):
    """Column-major as cuBLAS has it: what is called A stands on the right."""
    left, right = _rows(b).float(), _rows(a).float()
    return (left.T if transb else left) @ (right.T if transa else right)


def generic_gemm(
    a, transa, b, transb, out, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad,
    workspace, size, accumulate, split, **options,
):  # fmt: skip
    assert not gelu and quantizer is None
    made, bias_grad = _product(a, b, transa, transb), None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = _rows(b).float().sum(0).to(bias.dtype)
        else:
            made = made + bias.float()
    if not transb:
        made = made.reshape(*b.shape[:-1], made.shape[-1])
    if out is None:
        out = made.to(a.dtype if out_dtype is None else _CODES[int(out_dtype)])
    else:
        made = made.reshape(out.shape)
        out.copy_(out + made if accumulate else made)
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a, transa, b, transb, out, out_dtype, m_splits, bias, bias_dtype, single_output, gelu_in, grad,
    workspaces, size, accumulate, split, sm_count,
):  # fmt: skip
    targets = out[0].split(m_splits) if single_output else out
    for left, right, target in zip(a, b, targets, strict=True):
        if target.numel():
            made = _product(left, right, transa, transb)
            target.copy_(target + made if accumulate else made)
    return bias


def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
    assert not zero_centered and quantizer is None
    scale = (x.float().pow(2).mean(-1) + eps).rsqrt()
    y = (x.float() * scale[:, None] * weight.float()).to(_CODES[int(out_dtype)])
    if out is not None:
        y = out.copy_(y)
    return y, None, scale


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered):
    normed = x.float() * rsigma[:, None]
    scaled = dz.float() * gamma.float()
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)


def _attention_arguments(args):
    """Tensors, mask and window by kind: their places differ between the releases."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    (mask,) = (x.name for x in args if type(x).__name__ == "NVTE_Mask_Type")
    assert mask in ("NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_MASK"), mask
    ends = [x for x in tensors if x.dtype == torch.int32]
    # Queries, keys, and both with padding, which counts as tokens.
    assert len(ends) == 4 and torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])
    longest = [max(b - a for a, b in itertools.pairwise(e.tolist())) for e in ends[:2]]
    assert longest == list(args[:2]), "the longest sequence differs from the argument"
    values = [x for x in tensors if x.is_floating_point()]
    pieces = [
        (slice(*q), slice(*k))
        for q, k in zip(*(itertools.pairwise(e.tolist()) for e in ends[:2]), strict=True)
    ]
    ((before, after),) = (x for x in args if isinstance(x, (list, tuple)) and type(x[0]) is int)
    causal = mask == "NVTE_PADDING_CAUSAL_MASK"
    assert after in (-1, 0) and (causal or before == -1)
    return values, (before if causal else None), pieces


def _scores(q, k, scale, before):
    """Before: keys before the query's own that it attends to, -1 all; None: no mask."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if before is not None:
        assert len(q) == len(k)
        everything = torch.ones_like(scores[0], dtype=torch.bool)
        hidden = everything.triu(1)
        if before >= 0:
            hidden |= everything.tril(-before - 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, k


def fused_attn_fwd(*args):
    (q, k, v, *_), before, pieces = _attention_arguments(args)
    out, sums = torch.empty_like(q), torch.empty(*q.shape[:2], 1)
    for mine, others in pieces:
        scores, _ = _scores(q[mine].float(), k[others].float(), args[3], before)
        values = v[others].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        sums[mine] = scores.logsumexp(-1).T[..., None]
    return [out, sums, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*args):
    """From the sums that are handed over: in the ring they are those over all of its steps."""
    (q, k, v, out, d_out), before, pieces = _attention_arguments(args)
    (sums, *_) = next(x for x in args if isinstance(x, (list, tuple)) and torch.is_tensor(x[0]))
    out, d_out = out.view(q.shape).float(), d_out.view(q.shape).float()
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    for mine, others in pieces:
        queries, scale = q[mine].float(), args[2]
        scores, keys = _scores(queries, k[others].float(), scale, before)
        weights = (scores - sums[mine].squeeze(-1).T[..., None]).exp()
        values = v[others].float().repeat_interleave(repeats, 1)
        mean = (d_out[mine] * out[mine]).sum(-1).T[..., None]
        d_weights = torch.einsum("qhd,khd->hqk", d_out[mine], values)
        d_scores = weights * (d_weights - mean) * scale
        grads[0][mine] = torch.einsum("hqk,khd->qhd", d_scores, keys)
        for grad, made in (
            (grads[1], torch.einsum("hqk,qhd->khd", d_scores, queries)),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, d_out[mine])),
        ):
            grad[others] = made.unflatten(1, (-1, repeats)).sum(2)
    return [grad.to(q.dtype) for grad in grads] + [None]


def _half(ends, second):
    """Places of the first or second halves of all sequences."""
    parts = []
    for start, end in itertools.pairwise(ends.tolist()):
        middle = (start + end) // 2
        parts.append(torch.arange(middle, end) if second else torch.arange(start, middle))
    return torch.cat(parts)


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    return tensor[_half(cu_seqlens, half_idx)]


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    assert lse_packed
    places = _half(cu_seqlens, True)
    lse[:, places] = torch.logaddexp(lse[:, places], lse_per_step)


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    assert lse_packed
    return lse[:, _half(cu_seqlens, True)]


def thd_out_correction(out, out_per_step, *rest):
    """Add one step's output in its share of the whole sum; 2.20 rescales what is there first."""
    *old, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed = rest
    assert lse_packed
    places = _half(cu_seqlens, True) if only_second_half else slice(None)
    kept = out[places]
    if old:
        kept = kept * (old[0][:, places] - lse[:, places]).exp().T[..., None]
    share = (lse_per_step - lse[:, places]).exp().T[..., None]
    out[places] = (kept + out_per_step * share).to(out.dtype)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    halves = [_half(cu_seqlens, second) for second in (False, True)]
    alone = "none" in (first_half, second_half) or "zero" in (first_half, second_half)
    for places, action in zip(halves, (first_half, second_half), strict=True):
        made = grad_per_step if alone else grad_per_step[places]
        if action == "add":
            grad[places] += made
        elif action == "copy":
            grad[places] = made
        elif action == "zero":
            grad[places] = 0


def multi_tensor_adam(
    chunk, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay
):
    assert mode == 1 and bias_correction
    for g, p, m, v in zip(*lists, strict=True):
        m.lerp_(g.float(), 1 - beta1)
        v.mul_(beta2).addcmul_(g.float(), g.float(), value=1 - beta2)
        mean, square = m / (1 - beta1**step), v / (1 - beta2**step)
        p.sub_(lr * (mean / (square.sqrt() + eps) + decay * p))


def multi_tensor_l2norm(chunk, noop, lists, per_tensor):
    return torch.stack([x.float().norm() for x in lists[0]]).norm()[None], torch.empty(0)


def multi_tensor_scale(chunk, noop, lists, factor):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


OPERATIONS = (
    generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, fused_attn_fwd, fused_attn_bwd,
    thd_read_half_tensor, thd_second_half_lse_correction, thd_read_second_half_lse,
    thd_out_correction, thd_grad_correction, multi_tensor_adam, multi_tensor_l2norm,
    multi_tensor_scale,
)  # fmt: skip
