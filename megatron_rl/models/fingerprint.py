"""Whether two model folders hold the same model, wherever they lie."""

import hashlib
from pathlib import Path

SAMPLE = 1 << 16  # bytes
SAMPLES = 64  # of each file of weights, evenly spread; a smaller file is read whole
WEIGHTS = ("*.safetensors", "actor/*.distcp", "actor/.metadata")


def model_fingerprint(folder: str | Path) -> str:
    """A hash of config.json and of the weights' sizes and samples; moving a folder keeps it.

    Training or converting changes samples almost everywhere, so some megabytes of a file tell as
    much as all of it.
    """
    folder = Path(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
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
