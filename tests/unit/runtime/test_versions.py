"""One table of releases, and everything that names a release in agreement with it."""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_rl.runtime import versions

ROOT = Path(__file__).parents[3]


def test_requirements_of_package_equal_table(monkeypatch):
    package = {}
    monkeypatch.setattr("setuptools.setup", package.update)
    runpy.run_path(str(ROOT / "setup.py"))
    core = next(r for r in package["install_requires"] if r.startswith("megatron-core"))
    for one in versions.SETS:
        least = next(iter(SpecifierSet(one.megatron_core))).version
        assert Requirement(core).specifier.contains(least)
        assert package["extras_require"][one.device] == [one.vllm]


def test_table_in_docs_equals_table():
    assert versions.as_markdown() in (ROOT / "docs" / "gpu-check.md").read_text()


def test_shell_reads_supported_set():
    command = [sys.executable, "-m", "megatron_rl.runtime.versions", "cuda", "3.11"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    values = dict(line.split("=", 1) for line in shlex.split(output, posix=True))
    assert values["MEGATRON_CORE"] == "megatron-core==0.16.1"
    assert values["INSTALL_TRANSFORMER_ENGINE"] == (
        "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]==2.11.0'"
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
