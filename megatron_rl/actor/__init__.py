"""The Megatron-core actor; the only package that imports megatron."""

import logging
import warnings

# On import Megatron-core warns once per file that Transformer Engine and apex are missing. Their
# replacements are chosen deliberately, and `megatron-rl doctor` reports them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# Without CUDA, Megatron's calls go through cpu_adaptation.py, so deprecation warnings name it.
warnings.filterwarnings("ignore", module=r"megatron_rl\.actor\.cpu_adaptation")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
# Megatron-core warns about MLP classes other than its own; layers.GatedMlp is such a class.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
