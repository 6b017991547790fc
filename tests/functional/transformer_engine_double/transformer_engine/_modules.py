"""Norm, linears and grouped linear: parameters, marks and tensor parallelism.

As in Transformer Engine's pytorch/module/ and pytorch/ops/op.py.
"""

import torch
import torch.nn.functional as F

# Arguments without an effect here, and what they may be.
_WITHOUT_EFFECT = {
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "init_method": None,
    "ub_name": None,
    "fuse_wgrad_accumulation": (False,),
    "return_bias": (False,),
    "return_layernorm_output": (False,),
    "zero_centered_gamma": (False,),
}


def _ignore(arguments):
    for name, value in arguments.items():
        allowed = _WITHOUT_EFFECT[name]  # KeyError: the real one might not know it either
        assert allowed is None or value in allowed, (name, value)


def _mark(parameter, dimension):
    """`set_tensor_model_parallel_attributes` of pytorch/utils.py."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dimension
    parameter.partition_stride = 1


class Module(torch.nn.Module):
    """Extra state is an empty tensor where fp8 is off."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.numel() == 0

    def _add(self, name, *shape, dtype, device):
        # Not a number until it is loaded: what is left unloaded shows in every result.
        data = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.register_parameter(name, torch.nn.Parameter(data))
        return getattr(self, name)


def _rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


class RMSNorm(Module):
    def __init__(
        self,
        normalized_shape=None,
        *,
        eps,
        sequence_parallel=None,
        params_dtype,
        hidden_size=None,  # the older name of normalized_shape
        device,
        **ignored,
    ):
        super().__init__()
        _ignore(ignored)
        self.eps = eps
        size = normalized_shape or hidden_size
        weight = self._add("weight", size, dtype=params_dtype, device=device)
        if sequence_parallel is not None:
            weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return _rms_norm(x, self.weight, self.eps)


class Linear(Module):
    """y = x W^T + b, cut by columns (outputs) or rows (inputs) over `tp_group`.

    Under sequence parallelism a column-cut one gathers the tokens first, a row-cut one scatters
    their sums; otherwise the gradient of a column-cut one's input, and a row-cut one's output, are
    summed.
    """

    def __init__(
        self,
        in_features,
        out_features,
        *,
        params_dtype,
        device,
        sequence_parallel=False,
        tp_group=None,
        tp_size=1,
        bias=True,
        parallel_mode=None,
        **ignored,
    ):
        super().__init__()
        _ignore(ignored)
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        rows, columns = out_features, in_features
        if parallel_mode == "column":
            rows //= self.tp_size
        elif parallel_mode == "row":
            columns //= self.tp_size
        made = {"dtype": params_dtype, "device": device}
        _mark(self._add("weight", rows, columns, **made), 1 if parallel_mode == "row" else 0)
        if bias:
            added = self._add("bias", rows, **made)
            if parallel_mode == "row":
                added.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                _mark(added, 0)

    def forward(self, x, is_first_microbatch=None):
        # Megatron's own mappings; it imports this package, so not at the top.
        from megatron.core.tensor_parallel import mappings

        cut = self.parallel_mode if self.tp_size > 1 else None
        if cut == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif cut == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        out = F.linear(x, self.weight)
        if cut == "row" and self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif cut == "row":
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    """A norm of the tokens that this rank holds, then a column-cut linear."""

    def __init__(self, in_features, out_features, *, eps, normalization, **options):
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, **options)
        self.eps = eps
        made = {"dtype": options["params_dtype"], "device": options["device"]}
        norm = self._add("layer_norm_weight", in_features, **made)
        norm.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        return super().forward(_rms_norm(x, self.layer_norm_weight, self.eps))


class GroupedLinear(Module):
    """One linear per expert on its share of the rows; cut by the caller, without communication."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        params_dtype,
        device,
        tp_size,
        bias,
        sequence_parallel,
        tp_group=None,
        parallel_mode=None,
        **ignored,
    ):
        super().__init__()
        _ignore(ignored)
        assert tp_size == 1 and not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        made = {"dtype": params_dtype, "device": device}
        for index in range(num_gemms):
            weight = self._add(f"weight{index}", out_features, in_features, **made)
            _mark(weight, 1 if parallel_mode == "row" else 0)

    def init_fp8_metadata(self, num_gemms):
        """Nothing to prepare without fp8."""

    def forward(self, x, m_splits, is_first_microbatch=None):
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        parts = x.split(m_splits)
        return torch.cat([F.linear(p, w) for p, w in zip(parts, weights, strict=True)])
