"""The fused path: its kernel interpreted against the torch path, and compiled for a GPU.

Neither needs a GPU; where there is one, the checks run on it instead of in the interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


def run_python(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_agrees_with_the_torch_path():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    checks = Path(__file__).with_name("fused_checks.py")
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks), **interpreted)


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_rl.objectives import NAMED
from megatron_rl.objectives.fused import compile_time_choices
from megatron_rl.objectives.fused_kernel import token_kernel

spec = NAMED[sys.argv[1]]
constants = compile_time_choices(spec, spec.constraint) | {
    "HAS_ROLLOUT": True, "WEIGHT_DIVISOR": "t" if spec.weight == "prefix_mean" else "1"
}
types = {"mask_p": "*i1", "tokens": "i32", "denominator": "fp32", "denominator_rest": "fp32"}
types |= dict.fromkeys(("position_p", "length_p", "sequence_p", "pair_p"), "*i64")
types |= dict.fromkeys(("sums_p", "maxima_p", "counts_p", "columns_p"), "*fp64")
types |= {"histogram_p": "*i32"}
names = token_kernel.arg_names
signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in names}
source = ASTSource(
    fn=token_kernel,
    signature=signature,
    constexprs={(names.index(name),): value for name, value in constants.items()},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert "token_kernel" in compiled.asm["ptx"]
"""


# A gate, a dual clip of the path, a scaled one in log space, a truncation.
@pytest.mark.parametrize("name", ["pnpo", "grpo", "ctpo", "cispo"])
def test_the_kernel_compiles_for_a_gpu(name, tmp_path):
    run_python("-c", COMPILE, name, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works where there is a GPU")
def test_a_triton_that_runs_nothing_is_left_alone_and_said_so():
    # Installed, but neither a GPU nor the interpreter: the automatic choice is the torch path.
    code = """
import warnings
from megatron_rl.objectives import fused
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert not fused.triton_works("cpu") and not fused.triton_works("cpu")
assert len(said) == 1 and "runs no kernel on cpu" in str(said[0].message), said
"""
    run_python("-c", code)
