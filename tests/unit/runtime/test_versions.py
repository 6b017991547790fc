"""One table of releases, and everything that names a release in agreement with it."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_rl.runtime import versions
from tools import lock

ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(monkeypatch):
    """The arguments of setup() in setup.py."""
    arguments = {}
    monkeypatch.setattr("setuptools.setup", arguments.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_requirements_of_package_equal_table(package):
    core = next(r for r in package["install_requires"] if r.startswith("megatron-core"))
    for one in versions.SETS:
        least = next(iter(SpecifierSet(one.megatron_core))).version
        assert Requirement(core).specifier.contains(least)
        assert one.vllm in package["extras_require"][one.device]
        if one.device == "cpu":  # else pip may look at CUDA builds of newer releases first
            assert f"torch{one.torch}" in package["extras_require"]["cpu"]


@pytest.mark.parametrize(("kind", "python"), lock.SETS)
def test_lock_satisfies_requirements(kind, python, package):
    text = lock.lock_file(kind, python).read_text()
    releases = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M))
    assert len(releases) == len(re.findall(r"^\w", text, re.M)) > 100  # each has a hash
    assert "://" not in text and "index" not in text  # valid at every index
    if kind == "launcher":
        lines = (ROOT / "requirements" / "launcher.in").read_text().splitlines()
        wanted = [line.partition("  #")[0] for line in lines if not line.startswith("#")]
    else:
        extras = package["extras_require"]
        wanted = [*package["install_requires"], *extras[kind], *extras["dev"], *extras["data"],
                  *extras["reasoning_gym"]]  # fmt: skip
        one = versions.release_set(kind, python)
        wanted += [f"torch{one.torch}", one.vllm, f"megatron-core{one.megatron_core}"]
        assert [name for name in versions.MEDIA if name in releases and kind == "cpu"] == []
    for requirement in map(Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(releases[name]), requirement


def test_lock_of_cuda_torch_is_the_one_that_cpu_sets_need(package):
    """With hashes for every Python, and apart from torch nothing that the CPU lock has."""
    text = lock.TORCH_LOCK.read_text()
    found = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.M
    )
    releases = {name: (version, hashes.count("--hash")) for name, version, hashes in found}
    assert len(releases) == len(re.findall(r"^\w", text, re.M)) > 10
    assert "://" not in text and re.search(r"^# Download: \d\.\d GB$", text, re.M)
    for python in versions.PYTHONS:
        assert versions.release_set("cpu", python).torch == f"=={releases['torch'][0]}"
    assert releases["torch"][1] == len(versions.PYTHONS)
    cpu = set(re.findall(r"^([\w.-]+)==", lock.lock_file("cpu", "3.11").read_text(), re.M))
    assert cpu & set(releases) == {"torch"}


def test_locks_have_a_wheel_of_megatron_core_for_each_python():
    """Its metadata exclude Python 3.11, so uv drops that wheel; its source needs a compiler."""
    for kind, python in lock.SETS:
        if kind != "launcher":
            text = lock.lock_file(kind, python).read_text()
            (hashes,) = re.findall(r"^megatron-core==.*\n((?:    --hash.*\n)+)", text, re.M)
            assert hashes.count("--hash") == 7  # three Pythons, two machines, the source


def test_every_supported_set_has_a_lock():
    sets = {(one.device, python) for one in versions.SETS for python in one.pythons}
    assert sets <= set(lock.SETS)


def test_locks_for_cpu_have_the_same_releases():
    """What was tested under one Python is what the others get, with another file of torch."""
    texts = [lock.lock_file("cpu", python).read_text() for python in versions.PYTHONS]
    releases = [set(re.findall(r"^[\w.-]+==[^ ]+", text, re.M)) for text in texts]
    assert len(releases) == 3 and releases[0] == releases[1] == releases[2]
    torch = [re.search(r"^torch==.*\n    --hash=sha256:(\w{64})$", text, re.M) for text in texts]
    assert len({found and found[1] for found in torch} - {None}) == 3


def test_builds_that_cpu_torch_cannot_load_are_hidden(tmp_path, monkeypatch):
    """As after `pip install megatron_rl[cpu]` from an index with CUDA builds of torchvision."""

    def install(name, version):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)

    monkeypatch.syspath_prepend(str(tmp_path))
    install("torch", "2.13.0+cpu")
    install("torchaudio", "2.11.0+cpu")
    install("torchvision", "0.28.0")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator torchvision::nms')")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    del sys.modules["torchvision"]  # restored after the test
    assert versions.unloadable_builds() == {"torchvision": "0.28.0"}
    assert importlib.util.find_spec("torchvision") is not None
    versions.hide_unloadable_builds()
    assert importlib.util.find_spec("torchvision") is None  # how transformers and vLLM ask
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
    monkeypatch.setattr(versions, "installed_version", lambda name: "2.13.0")  # a build for CUDA
    assert versions.unloadable_builds() == {}


def test_requirements_beside_torch_leave_out_what_names_a_build(tmp_path, monkeypatch):
    (tmp_path / "engine-1.dist-info").mkdir()
    needs = ("torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchaudio", "torchcodec>=0.14",
             "numpy", "torchtyping>=1; python_version > '3'")  # fmt: skip
    lines = ["Metadata-Version: 2.1", "Name: engine", "Version: 1"]
    text = "\n".join(lines + [f"Requires-Dist: {one}" for one in needs])
    (tmp_path / "engine-1.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions.requirements_beside_torch("engine") == [*needs[3:]]


def test_table_in_docs_equals_table():
    assert versions.as_markdown() in (ROOT / "docs" / "gpu-check.md").read_text()


def test_shell_reads_supported_set():
    command = [sys.executable, "-m", "megatron_rl.runtime.versions", "cuda", "3.11"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    values = dict(line.split("=", 1) for line in shlex.split(output, posix=True))
    assert values["MEGATRON_CORE"] == "megatron-core>=0.19.2,<0.20"
    assert values["INSTALL_TRANSFORMER_ENGINE"] == (
        "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]==2.20.2'"
    )


def test_unsupported_release_of_set_is_named():
    with pytest.raises(ValueError, match=r"for cpu and Python 3\.10; use Python 3\.11, 3\.12"):
        versions.release_set("cpu", "3.10")
    command = [sys.executable, "-m", "megatron_rl.runtime.versions", "tpu", "3.11"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.split(":")[0]) == (1, "ERROR")


def test_installed_releases_are_in_range():
    for one in versions.SETS:
        if one.cuda:
            assert SpecifierSet(one.transformer_engine).contains(one.transformer_engine_install)
