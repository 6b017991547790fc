"""Run a function on several gloo processes, as a real job would, and collect its results."""

import ctypes
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal a process gets when its parent ends


def find_free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(
    function: Callable, rank: int, world_size: int, port: int, queue: Any, args: tuple
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test leaves none
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
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


def run_ranks(function: Callable, world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` spawned gloo ranks.

    Returns each rank's (picklable) result in rank order. Raises AssertionError with the first
    failing rank's traceback, and TimeoutError if a rank has not answered within `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = find_free_port()
    processes = [
        context.Process(target=_main, args=(function, rank, world_size, port, queue, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
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
