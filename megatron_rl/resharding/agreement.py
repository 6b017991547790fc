"""Errors that every rank raises together, so that none waits for one that has given up."""

import torch
import torch.distributed as dist


def wire_device() -> torch.device:
    """Where small tensors must lie for the default process group's collectives."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_together(error: Exception | None, *, doing: str) -> None:
    """Collective over all processes: raise RuntimeError everywhere if any rank has an `error`.

    doing: what was attempted, for the message. One integer is exchanged where all is well.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise RuntimeError(f"{doing}: {error}") from error
        return
    failures = torch.tensor([int(error is not None)], device=wire_device())
    dist.all_reduce(failures)
    if not int(failures):
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    told = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    raise RuntimeError(f"{doing}: " + "; ".join(told)) from error
