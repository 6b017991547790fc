"""Run a function on several gloo processes, as a real job would, and collect its results."""

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal a process gets when its parent ends
_SPAWN = multiprocessing.get_context("spawn")
_context: BaseContext = _SPAWN
_refused = False


def fork_from(*modules: str) -> None:
    """Fork all later processes from a server that imports modules, starting now.

    So imports are paid for once. Its working folder is the present one.
    """
    global _context
    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


def refuse() -> None:
    """Skip every later test that would start a process."""
    global _refused
    _refused = True


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_process(
    function: Callable, *args: Any, context: BaseContext | None = None
) -> BaseProcess:
    """Run `function(*args)` in a process with this environment, which ends with this process."""
    if _refused:
        pytest.skip("starts a process")
    process = (context or _context).Process(target=_begin, args=(function, dict(os.environ), args))
    process.start()
    return process


def make_queue() -> Any:
    """Return a queue for results of processes of `start_process`."""
    return _context.Queue()


def _begin(function: Callable, environment: dict[str, str], args: tuple) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test leaves none
    # A collection would otherwise go through all that was imported before, and copy its pages.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def _main(function: Callable, place: dict[str, str], queue: Any, args: tuple) -> None:
    os.environ.update(place)
    rank, world_size = int(place["RANK"]), int(place["WORLD_SIZE"])
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        result = function(rank, world_size, *args)
        queue.put((rank, result, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(
    function: Callable, world_size: int, *args: Any, timeout: float = 300, fresh: bool = False
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` gloo ranks.

    fresh: in new interpreters, for what must happen before anything is imported. Returns each
    rank's (picklable) result in rank order. Raises AssertionError with the first failing rank's
    traceback, and TimeoutError if a rank has not answered within `timeout` seconds.
    """
    from torch.distributed import TCPStore

    context = _SPAWN if fresh else _context
    queue = context.Queue()
    # As under torchrun the ranks meet at a store of whoever starts them: no port is guessed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": rank,
            "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        for rank in range(world_size)
    ]  # fmt: skip
    processes = [
        start_process(
            _main, function, {k: str(v) for k, v in place.items()}, queue, args, context=context
        )
        for place in places
    ]
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            try:
                rank, result, error = queue.get(timeout=timeout)
            except Exception as no_answer:
                missing = sorted(set(range(world_size)) - set(results))
                raise TimeoutError(f"ranks {missing} gave no result in {timeout} s") from no_answer
            assert error is None, f"rank {rank} failed:\n{error}"
            results[rank] = result
        for process in processes:
            process.join(timeout=60)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world_size)]
