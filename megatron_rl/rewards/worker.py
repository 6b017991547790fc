"""A verifier's process: one JSON line in, one JSON line out, until its input ends.

Started by `megatron_rl.rewards.pool` as `python -m megatron_rl.rewards.worker`, with a fresh
interpreter: forking a process that holds torch, vLLM and gloo threads copies locks that nobody
will release. Sends `"ready"` once the verifier is loaded.
"""

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from io import RawIOBase
from typing import BinaryIO

from megatron_rl.rewards.verifier import Verifier, load_verifier

ORPHAN_CHECK_SECONDS = 5.0


def main() -> None:
    """Serve judgements until standard input ends or the parent is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--memory-limit", type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C and SLURM's signals reach every process of a job, while the trainer means to finish
    # its step: a worker ends when its parent does, not before.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    # The kernel's answer to an alarm is to end the process, even inside C code that holds the
    # interpreter's lock. The parent kills sooner; this is for a worker whose parent has died.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Answers go to a copy of standard output, so that a verifier that prints corrupts nothing.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    verifier = load_verifier(arguments.verifier)
    _limit_memory(arguments.memory_limit)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone; it is not ours to say so
        _send(output, "ready")
        _serve(verifier, sys.stdin.buffer, output, time_limit=arguments.time_limit)


def _serve(verifier: Verifier, source: BinaryIO, output: RawIOBase, *, time_limit: float) -> None:
    parent = os.getppid()
    while True:
        # One request is outstanding at a time, so nothing waits in the buffer of `source`.
        if not select.select([source], [], [], ORPHAN_CHECK_SECONDS)[0]:
            if os.getppid() != parent:
                return
            continue
        line = source.readline()
        if not line:
            return
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
        try:
            answer: object = verifier(*json.loads(line))
        except Exception:  # noqa: BLE001 - whatever it is, the parent raises it
            answer = {"traceback": traceback.format_exc()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(output, answer)


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _send(output: RawIOBase, answer: object) -> None:
    rest = memoryview(json.dumps(answer).encode() + b"\n")
    while rest:
        rest = rest[output.write(rest) :]


if __name__ == "__main__":
    main()
