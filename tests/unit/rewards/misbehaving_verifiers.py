"""Verifiers that do what a verifier must not, by order of the response; no torch here."""

import os
import signal
import sys
import time
from pathlib import Path


def verify_scripted(text, ground_truth, data_source):
    """Follow the instruction in `text`, or give its length as the reward."""
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
        case ["wait-for", path]:
            while not Path(path).exists():
                time.sleep(0.01)
        case ["touch", path]:
            Path(path).touch()
        case ["spin"]:  # keeps the interpreter's lock inside C code
            sum(range(10**12))
        case ["print"]:
            print("noise on", "standard output")
            print("and on error", file=sys.stderr)
        case ["print-5000"]:
            print("a line\n" * 5000)
        case ["return-nothing"]:
            return None
        case ["raise-once", path] if not Path(path).exists():
            Path(path).touch()
            raise LookupError("broken for the moment")
        case ["pid"]:
            return 0.0, str(os.getpid()), None
        case ["pid-later"]:  # others have a worker of their own
            time.sleep(0.5)
            return 0.0, str(os.getpid()), None
        case ["environment"]:
            return 0.0, ",".join(sorted(os.environ)), None
        case ["fill", gib]:
            return float(len(bytes(int(float(gib) * 2**30))) > 0)  # never touched
        case ["modules"]:
            return 0.0, ",".join(sorted({"torch", "vllm", "numpy"} & set(sys.modules))), None
    return float(len(text)), data_source, ground_truth


def verify_many_scripted(texts, ground_truths, data_sources):
    """The same for lists; `count` gives the number of responses that came together."""
    return [
        (float(len(texts)), "counted", None) if text == "count" else verify_scripted(text, *rest)
        for text, *rest in zip(texts, ground_truths, data_sources, strict=True)
    ]


def score_by_name(text, ground_truth, data_source):
    """Rewards by the names that `text` lists; a single number for none."""
    if text == "sleep":
        time.sleep(60)
    rewards = {name: 1.0 / (place + 1) for place, name in enumerate(text.split())}
    return rewards or 0.0


def score_by_parts(text, ground_truth, data_source):
    """Two rewards, and half a character in the reason, as JSON that was cut leaves it."""
    from tests.functional.sums import grade

    reward, reason, answer = grade(text, ground_truth, data_source)
    return {"correct": reward, "boxed": float("boxed" in text)}, f"{reason} \ud83d", answer


def have_another_signature(completions, **kwargs):
    """A reward of TRL."""
    return [0.0 for _ in completions]


def break_in_a_run(text, ground_truth, data_source):
    """A verifier of one's own with a mistake that its trial does not meet."""
    print("judging")
    if text not in ("", ground_truth):
        raise LookupError("broken on purpose")
    return 0


def return_a_pair(text, ground_truth, data_source):
    """A mistake that its trial meets."""
    return 0.0, "wrong"


def read_far_away(answer):
    """By a function that only this module knows."""
    return _evaluated(answer)


def _evaluated(answer):
    return eval(answer)
