"""Everything Megatron: the only package that imports megatron."""

import warnings

# At import Megatron-core warns once per file that Transformer Engine and apex are missing; what is
# used instead is a choice of ours, which `megatron-rl doctor` reports.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
