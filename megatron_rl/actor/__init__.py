"""Everything Megatron: the only package that imports megatron."""

import logging
import warnings

# At import Megatron-core warns once per file that Transformer Engine and apex are missing; what is
# used instead is a choice of ours, which `megatron-rl doctor` reports.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# Off CUDA Megatron's calls run through that file, and their deprecation warnings name it.
warnings.filterwarnings("ignore", module=r"megatron_rl\.actor\.cpu_adaptation")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
# It also warns of every MLP class that is not its own; ours is (see layers.GatedMlp).
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
