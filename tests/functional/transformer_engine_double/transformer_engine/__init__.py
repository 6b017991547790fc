"""A double of Transformer Engine: the documented contract of the classes that Megatron's layer spec
instantiates, in plain torch, on the CPU.

Transformer Engine needs a CUDA device. With this package on the path Megatron takes it for the real
one, so that its Transformer Engine layers are built and run by our actor: their parameters' names,
shapes and marks, their communication, what they are handed of a pack, their checkpoints. It says
nothing about Transformer Engine's kernels: neither their rounding nor their speed nor which of them
would be chosen, and nothing about fp8.
"""

from types import SimpleNamespace

from transformer_engine import pytorch

common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object))  # derived from, not used

__all__ = ["common", "pytorch"]
__version__ = "2.6.0"
