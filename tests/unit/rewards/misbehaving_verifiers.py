"""Verifiers that do what a verifier must not, by order of the response; no torch here."""

import os
import signal
import time
from pathlib import Path


def verify_as_told(text, ground_truth, data_source):
    """Does what `text` says, and otherwise gives its length as the reward."""
    match text.split():
        case ["raise"]:
            raise LookupError("broken on purpose")
        case ["die"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["die-once", path] if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:  # holds the interpreter's lock inside C code
            sum(range(10**12))
        case ["print"]:
            print("noise on standard output", flush=True)
        case ["pid"]:
            return 0.0, str(os.getpid()), None
        case ["modules"]:
            import sys

            return 0.0, ",".join(sorted({"torch", "vllm", "numpy"} & set(sys.modules))), None
    return float(len(text)), data_source, ground_truth


def break_always(text, ground_truth, data_source):
    """A verifier of one's own with a mistake in it."""
    raise LookupError("broken on purpose")
