"""One version in all places, and files that a release needs."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron_rl
from megatron_rl.cli import main

ROOT = Path(__file__).parents[2]


def test_version_has_one_source(capsys):
    command = [sys.executable, "setup.py", "--version"]
    built = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"megatron-rl {megatron_rl.__version__}\n"
    assert built.split() == [citation["version"]] == [megatron_rl.__version__]
    assert newest is not None and newest[1] in (megatron_rl.__version__, "Unreleased")


def test_release_has_a_date():
    version = re.escape(megatron_rl.__version__)
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {version} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", text, re.MULTILINE)


def test_package_contains_every_data_file(monkeypatch):
    arguments: dict = {}
    monkeypatch.setattr("setuptools.setup", arguments.update)
    runpy.run_path(str(ROOT / "setup.py"))
    packed = {
        file
        for package, patterns in arguments["package_data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    there = (ROOT / "megatron_rl").rglob("*")  # not by git, which an archive does without
    files = {one for one in there if one.is_file() and one.suffix not in (".py", ".pyc")}
    assert files == packed


def test_license_equals_megatron_core_and_vllm():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert 'license="Apache-2.0"' in (ROOT / "setup.py").read_text()
