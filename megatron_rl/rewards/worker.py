"""A verifier's process: one JSON line in, one JSON line out, until its input ends.

Started by `megatron_rl.rewards.process` as `python -m megatron_rl.rewards.worker`, with a fresh
interpreter: forking a process that holds torch, vLLM and gloo threads copies locks that nobody
will release. Says how it wants to be called once the verifier is loaded, or why it is not.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from io import RawIOBase
from typing import BinaryIO

from megatron_rl.interruption import end_with_parent
from megatron_rl.rewards.calling import Call
from megatron_rl.rewards.verifier import Item, load_verifier

ADDRESS_SPACE = 4 << 30  # bytes that a worker may have


def main() -> None:
    """Serve judgements until standard input ends; the kernel ends it when the parent is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    # The kernel ends this process with its parent, also inside C code; its input ends too, but only
    # when every process that the parent has forked is gone.
    end_with_parent(arguments.parent)
    # Ctrl-C and SLURM's signals reach every process of a job, while the trainer means to finish
    # its step: a worker ends when its parent does, not before.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    # The kernel's answer to an alarm is to end the process, even inside C code that holds the
    # interpreter's lock. The parent kills sooner; this is for one that is stopped.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Answers go to a copy of standard output, so that a verifier that prints corrupts nothing; what
    # it prints leaves line by line, with what it says on standard error.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone; it is not ours to say so
        try:
            verifier = load_verifier(arguments.verifier)
        except Exception:  # noqa: BLE001 - the parent raises it
            _send(output, {"error": traceback.format_exc()})
            return
        call = Call(verifier, name=arguments.verifier, time_limit=arguments.time_limit)
        _limit_memory()
        _send(output, {"takes_many": call.takes_many, "wants_row": call.wants_row})
        _serve(call, sys.stdin.buffer, output)


def _serve(call: Call, source: BinaryIO, output: RawIOBase) -> None:
    while line := source.readline():
        signal.setitimer(signal.ITIMER_REAL, 2 * call.time_limit + 1)
        answers = call.judge([Item(*item) for item in json.loads(line)])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(output, answers)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _send(output: RawIOBase, answer: object) -> None:
    rest = memoryview(json.dumps(answer).encode() + b"\n")
    while rest:
        rest = rest[output.write(rest) :]


if __name__ == "__main__":
    main()
