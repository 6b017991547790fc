"""Fingerprints do not change when a model is moved, and change with its weights."""

import shutil

import numpy as np

from megatron_rl.models import fingerprint
from megatron_rl.models.fingerprint import model_fingerprint


def make(folder, weights):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_fingerprint_of_small_model_covers_every_byte(tmp_path):
    weights = bytes(range(256)) * 40
    original = make(tmp_path / "a", weights)
    assert model_fingerprint(shutil.copytree(original, tmp_path / "b")) == model_fingerprint(
        original
    )
    other = make(tmp_path / "c", weights[:5000] + b"x" + weights[5001:])
    assert model_fingerprint(other) != model_fingerprint(original)


def test_fingerprint_samples_of_large_model_include_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SAMPLE", 64)
    monkeypatch.setattr(fingerprint, "SAMPLES", 8)
    weights = np.random.default_rng(1).bytes(10_000)
    before = model_fingerprint(make(tmp_path / "a", weights))
    # An update changes nearly every element; the samples always include the last ones.
    assert model_fingerprint(make(tmp_path / "b", weights[:-1] + b"x")) != before
    assert model_fingerprint(make(tmp_path / "c", weights + b"x")) != before
