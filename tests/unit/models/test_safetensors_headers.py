"""Headers of safetensors files: valid files are read, incomplete ones are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models import safetensors_headers
from megatron_rl.models.safetensors_headers import find_files, model_fingerprint, read_header


def test_read_header_returns_shapes_and_dtypes(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "model.safetensors")
    assert {name: (entry["shape"], entry["dtype"]) for name, entry in header.items()} == {
        "a": ([2, 3], "F32"), "b": ([4], "BF16")}  # fmt: skip
    assert find_files(tmp_path) == dict.fromkeys("ab", "model.safetensors")


def test_read_header_of_file_without_tensors_is_empty(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors") == {}


@pytest.mark.parametrize("change", [-1, 1])
def test_read_header_refuses_file_of_wrong_size(tmp_path, change):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(5)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:change] if change < 0 else whole + b"x")
    with pytest.raises(
        ValueError, match=rf"has {len(whole) + change} bytes, .* {len(whole)}; down"
    ):
        read_header(file)


def test_read_header_refuses_header_longer_than_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"not a complete safetensors file \(10 bytes\)"):
        read_header(file)


def test_read_header_refuses_invalid_json(tmp_path):
    for header in (b"[1]", b'{"a": 1}', b"{nothing}", b'{"a": {"shape": [1]}}'):
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ValueError, match="has no safetensors header; download"):
            read_header(tmp_path / "x")


def test_find_files_reads_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x"}}))
    assert find_files(tmp_path) == {"a": "x"}


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
    monkeypatch.setattr(safetensors_headers, "SAMPLE", 64)
    monkeypatch.setattr(safetensors_headers, "SAMPLES", 8)
    weights = np.random.default_rng(1).bytes(10_000)
    before = model_fingerprint(make(tmp_path / "a", weights))
    # An update changes nearly every element; the samples always include the last ones.
    assert model_fingerprint(make(tmp_path / "b", weights[:-1] + b"x")) != before
    assert model_fingerprint(make(tmp_path / "c", weights + b"x")) != before
