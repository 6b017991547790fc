"""Variables that people keep in their profiles: they change no number of a run, or are named.

In new interpreters: libraries read most of them when they are imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.runs.files import read_metrics
from megatron_rl.runtime.processes import has_cuda
from tests.functional.tiny_runs import CUT, ROOT, make_task, training_arguments

pytestmark = pytest.mark.slow
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
TIMED = ("time/", "memory/", "sync/", "rollout/tokens_per_second", "rollout/engine_imbalance")
SHORT = ("trainer.steps=2", "trainer.epochs=1", "trainer.minibatches=1", *CUT,
         "rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "eval.sets={}",
         "trainer.stall_seconds=90")  # fmt: skip
# Together what each of them is for; those of one profile do not hide each other's effects.
PROFILES = {
    "vllm": {
        "VLLM_USE_V1": "0", "VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "1",
    },
    "debugging": {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_LOGS": "+dynamo",
        "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1",
        "PYTHONFAULTHANDLER": "1", "PYTHONDEVMODE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    },
    "ranks": {
        "MASTER_ADDR": "head.example.org", "MASTER_PORT": "29500", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1", "NNODES": "2", "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "8", "SLURM_PROCID": "3",
    },
    "hub": {
        "HF_HUB_OFFLINE": "0", "HF_HOME": "{folder}/hub", "HF_TOKEN": "hf_none",
        "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_CACHE": "{folder}/t",
        "WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40, "WANDB_PROJECT": "mine",
        "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "", "ALL_PROXY": "http://127.0.0.1:9",
    },
    "python": {
        "PYTHONHASHSEED": "7", "PYTHONPATH": "{folder}/mine", "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NUM_THREADS": "3", "TMPDIR": "{folder}/tmp", "KMP_AFFINITY": "disabled",
    },
}  # fmt: skip


def run(folder, variables):
    """Metrics without times, and the output, of a run in a new interpreter."""
    for name in ("mine", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "mine" / "conftest.py").write_text("raise SystemExit('imported')")
    given = {name: value.format(folder=folder) for name, value in variables.items()}
    if "PYTHONPATH" in given:
        given["PYTHONPATH"] += os.pathsep + str(ROOT)
    arguments = training_arguments(*SHORT, f"run.dir={folder}/runs", "run.name=run")
    command = [sys.executable, "-m", "megatron_rl.cli", *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in given}
    done = subprocess.run(
        command, cwd=ROOT, env=clean | given, text=True, check=False, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    rows = read_metrics(Path(folder) / "runs" / "run")
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows], done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    make_task()
    return run(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.parametrize("name", PROFILES)
def test_usual_variables_change_no_metric(name, plain, tmp_path):
    rows, output = run(tmp_path, PROFILES[name])
    assert rows == plain[0]
    if name == "vllm":  # what this release of vLLM does not read, whatever it is called
        assert "the environment has VLLM_ATTENTION_BACKEND, VLLM_USE_V1: vLLM" in output


KERNELS = """
from megatron_rl.runtime.processes import prepare_environment
prepare_environment()
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform
current_platform.import_kernels()
layer = ops.create_onednn_mm(torch.ones(64, 192), 1)  # of its own kernels it keeps one
for _ in range(2):
    for rows in range(1, 301):
        ops.onednn_mm(layer, torch.ones(rows, 64), None)
"""


@pytest.mark.skipif(has_cuda(), reason="on CUDA oneDNN computes nothing")
@pytest.mark.parametrize(("given", "made"), [({}, 600), ({CAPACITY: "1024"}, 300)])
def test_engine_keeps_so_many_kernels(given, made):
    """A kernel for each of 300 shapes: the first are dropped before they are needed again."""
    clean = {name: value for name, value in os.environ.items() if name != CAPACITY}
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], cwd=ROOT, text=True, check=True, capture_output=True,
        env=clean | {"ONEDNN_VERBOSE": "profile_create"} | given,
    )  # fmt: skip
    assert len(re.findall("create:cache_miss,cpu,matmul", done.stdout)) == made
