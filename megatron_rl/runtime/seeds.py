"""Named seeds: every random choice of a run has its own seed, derived from the run's seed."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a seed in [0, 2^31) for one named use, such as ("rollout", step).

    Equal arguments give equal seeds on every machine. No global generator is used, so a resumed run
    makes the same random choices as an uninterrupted run.
    """
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
