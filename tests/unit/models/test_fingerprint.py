"""A moved model keeps its fingerprint; other weights, however few, have another."""

import shutil

import numpy as np

from megatron_rl.models import fingerprint
from megatron_rl.models.fingerprint import model_fingerprint


def make(folder, weights):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_small_models_are_read_whole(tmp_path):
    weights = bytes(range(256)) * 40
    one = make(tmp_path / "a", weights)
    assert model_fingerprint(shutil.copytree(one, tmp_path / "b")) == model_fingerprint(one)
    other = make(tmp_path / "c", weights[:5000] + b"x" + weights[5001:])
    assert model_fingerprint(other) != model_fingerprint(one)


def test_large_models_are_sampled_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SAMPLE", 64)
    monkeypatch.setattr(fingerprint, "SAMPLES", 8)
    weights = np.random.default_rng(1).bytes(10_000)
    before = model_fingerprint(make(tmp_path / "a", weights))
    # An update changes nearly every element; the last ones are always among the samples.
    assert model_fingerprint(make(tmp_path / "b", weights[:-1] + b"x")) != before
    assert model_fingerprint(make(tmp_path / "c", weights + b"x")) != before
