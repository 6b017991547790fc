"""A verifier process: reads and writes one JSON line per request until its input ends.

Started by `megatron_rl.rewards.process` as `python -m megatron_rl.rewards.worker`, with a new
interpreter: forking a process with torch, vLLM and gloo threads copies locks that are never
released. Its first line reports the verifier's calling convention, or why loading it failed.
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

from megatron_rl.rewards.calling import Call, SignatureError
from megatron_rl.rewards.verifier import Item, load_verifier
from megatron_rl.runtime.interruption import end_with_parent


def main() -> None:
    """Serve requests until standard input ends; the kernel kills the process with its parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-gib", type=float)
    arguments = parser.parse_args()
    output = isolate(arguments.parent)
    # The default action of SIGALRM ends the process, even inside C code with the interpreter's
    # lock. The parent kills it sooner, unless the parent itself is suspended.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        try:
            verifier = load_verifier(arguments.verifier)
            call = Call(verifier, name=arguments.verifier, time_limit=arguments.time_limit)
        except SignatureError as error:
            send(output, {"error": str(error)})
            return
        except Exception:  # noqa: BLE001 - the parent raises it
            send(output, {"error": traceback.format_exc()})
            return
        if arguments.memory_gib is not None:
            _limit_memory(int(arguments.memory_gib * 2**30))
        send(output, {"takes_many": call.takes_many, "wants_row": call.wants_row})
        _serve(call, sys.stdin.buffer, output)


def isolate(parent: int) -> RawIOBase:
    """Make this process a worker of process `parent`; return the output for its answers."""
    # The kernel kills this process with its parent, also inside C code; its input also ends, but
    # only when every process that the parent has forked is gone.
    end_with_parent(parent)
    # Ctrl-C and SLURM's signals reach every process of a job, while the trainer still finishes
    # its step: a worker must end with its parent, not before.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    # Answers go to a copy of standard output, so that a verifier that prints does not corrupt them;
    # its printed lines go to standard error, line by line.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    return output


def _serve(call: Call, source: BinaryIO, output: RawIOBase) -> None:
    while line := source.readline():
        signal.setitimer(signal.ITIMER_REAL, 2 * call.time_limit + 1)
        answers = call.grade([Item(*item) for item in json.loads(line)])
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(output, answers)


def _limit_memory(wanted: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def send(output: RawIOBase, answer: object) -> None:
    """Write one line of JSON."""
    rest = memoryview(json.dumps(answer).encode() + b"\n")
    while rest:
        rest = rest[output.write(rest) :]


if __name__ == "__main__":
    main()
