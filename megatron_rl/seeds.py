"""Seeds by name: every random choice of a run has its own, derived from the run's seed."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2^31) for one named use, such as ("rollout", step).

    Equal arguments give equal seeds on every machine; no global generator is read or moved, so a
    resumed run draws what the uninterrupted run would have drawn.
    """
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
