"""A verifier that hangs on every response but those of its trial; no torch here."""


def hang(text, ground_truth, data_source):
    """Inside C code that keeps the interpreter's lock."""
    if text not in ("", ground_truth):
        sum(range(10**12))
    return 0.0
