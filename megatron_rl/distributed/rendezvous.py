"""The start of all ranks: each connects to the store of rank 0; the missing ones are named."""

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.errors import UserError
from megatron_rl.runtime.joining import notify
from megatron_rl.runtime.processes import LAUNCHER

PATIENCE = timedelta(seconds=10)  # before the first message
LAUNCHED_PATIENCE = timedelta(seconds=60)  # of ranks that this node's launcher started
REPEAT = timedelta(seconds=60)  # between two messages
NAMED_RANKS = 8  # most missing ranks that a message lists


def join_ranks(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store, rank and world size of torch's `env://` variables when all ranks are here.

    After ten seconds and then every minute, rank 0 prints which ranks are missing, and a rank that
    cannot connect prints the address. Raises UserError after `timeout`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = LAUNCHED_PATIENCE if LAUNCHER in os.environ else PATIENCE
    # torchrun's agent has a store of its own, which serves rank 0, too.
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    message = (
        f"rank {rank} of {world_size} waits for rank 0 at {host}:{port} (MASTER_ADDR, "
        "MASTER_PORT): it has not started, or this node cannot reach it"
    )
    timer = threading.Timer(patience.total_seconds(), notify, (message,))
    timer.daemon = True
    timer.start()
    try:
        store = dist.TCPStore(
            host, port, world_size, is_host, timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"rank {rank} of {world_size} cannot use {host}:{port} as the meeting point of all "
            f"ranks ({first}); set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
            "port of it, or unset RANK and WORLD_SIZE if they are left over"
        ) from error
    finally:
        timer.cancel()
    _wait_for_all(store, rank, world_size, f"{host}:{port}", patience=patience, timeout=timeout)
    return store, rank, world_size


def _wait_for_all(
    store: dist.Store,
    rank: int,
    world_size: int,
    address: str,
    *,
    patience: timedelta,
    timeout: timedelta,
) -> None:
    """Return when every rank has called this."""
    store.set(f"present/{rank}", "")
    if store.add("present", 1) >= world_size:  # more after a restart by torchrun
        store.set("complete", "")
    deadline, pause = time.monotonic() + timeout.total_seconds(), patience
    while True:
        try:
            store.wait(["complete"], pause)
            return
        except dist.DistStoreError:
            missing = [r for r in range(world_size) if not store.check([f"present/{r}"])]
        text = (
            f"rank {rank} waits at {address} for {len(missing)} of {world_size} ranks: "
            f"{', '.join(map(str, missing[:NAMED_RANKS]))}"
            f"{', ...' if len(missing) > NAMED_RANKS else ''} have not started"
        )
        if time.monotonic() > deadline:
            raise UserError(f"{text} within {timeout.total_seconds():.0f} s; look at their output")
        if rank == 0 and missing:
            left_over = "; if WORLD_SIZE is left over, press Ctrl-C and unset RANK WORLD_SIZE"
            notify(text + ("" if LAUNCHER in os.environ else left_over))
        pause = REPEAT
