"""Imports of the process that tests fork ranks and runs from: all that a run imports.

`tests.ranks.fork_from` names this module to that process; no test imports it.
"""

import gc
import importlib

import pyarrow

from megatron_rl.commands.train import rank_modules
from megatron_rl.runtime.processes import prepare_environment, quiet_libraries

MODULES = (
    *rank_modules(),
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
    "compressed_tensors", "matplotlib.figure", "mpl_toolkits.mplot3d.axes3d", "tabulate",
)  # fmt: skip

prepare_environment()
quiet_libraries()
for module in MODULES:
    importlib.import_module(module)
pyarrow.array([0])  # imports pandas where it is, which every run would do with its first row
# A collection in a forked process would otherwise go through all that was imported, several times.
gc.collect()
gc.freeze()
