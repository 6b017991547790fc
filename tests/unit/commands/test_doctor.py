"""What the doctor finds, and the namesake of NVIDIA apex."""

import sys

from megatron_rl.commands import doctor


def finding(part):
    return next(one for one in doctor.examine() if one.part == part)


def test_it_finds_what_training_needs(capsys):
    assert doctor.print_report() == 0
    said = capsys.readouterr().out
    for part in ("megatron-core", "vllm", "Transformer Engine", "NVIDIA apex", "collectives"):
        assert part in said
    assert "ready to train" in said


def test_a_namesake_is_not_nvidia_apex(tmp_path, monkeypatch):
    assert finding("NVIDIA apex").found in ("missing", "present")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()  # as PyPI's apex: importable, no CUDA extensions
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    found = finding("NVIDIA apex")
    assert found.found == "a namesake"
    assert "pip uninstall apex" in found.use


def test_a_missing_part_is_named(capsys, monkeypatch):
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda *n: None if "vllm" in n else versions(*n))
    assert doctor.print_report() == 1
    assert "cannot train: vllm missing; run tools/setup_env.sh" in capsys.readouterr().out


def test_the_compiler_that_installation_needs_is_a_row(tmp_path, monkeypatch):
    assert finding("C++ compiler").good  # the suite needs one
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert (finding("C++ compiler").found, finding("C++ compiler").good) == ("missing", False)
