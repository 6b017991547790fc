"""Fingerprints of model folders that do not depend on their location."""

import hashlib
from pathlib import Path

SAMPLE = 1 << 16  # bytes
SAMPLES = 64  # evenly spread over each weights file; smaller files are read whole


def model_fingerprint(folder: str | Path) -> str:
    """Hash config.json and the sizes and samples of the weights; independent of the folder's path.

    Training changes nearly every value, so a few megabytes per file are enough to
    detect a different model.
    """
    folder = Path(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            if size <= SAMPLE * SAMPLES:
                digest.update(stream.read())
                continue
            for index in range(SAMPLES):
                stream.seek((size - SAMPLE) * index // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()
