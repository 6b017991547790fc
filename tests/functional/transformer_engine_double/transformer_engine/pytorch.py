"""What Megatron imports of `transformer_engine.pytorch`."""

import sys
from types import ModuleType

from transformer_engine._attention import DotProductAttention
from transformer_engine._modules import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm"]

# Named at import, not used without fp8 and the operation-based API.
_NAMES = {
    "distributed": ("CudaRNGStatesTracker", "activation_recompute_forward"),
    "fp8": ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"),
    "ops": ("FusibleOperation", "Sequential"),
    "tensor": ("QuantizedTensor",),
}
for _name, _members in _NAMES.items():
    _module = ModuleType(f"{__name__}.{_name}")
    for _member in _members:
        setattr(_module, _member, type(_member, (), {}))
    sys.modules[_module.__name__] = globals()[_name] = _module
