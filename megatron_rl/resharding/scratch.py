"""Memory for tensors on their way into the engine, used again once the engine lets go of them."""

import math
import weakref

import numpy as np
import torch
from torch import Tensor


class ScratchPool:
    """Hands out uninitialised tensors; the memory of one that nobody refers to serves the next.

    A loader may keep a tensor, or a view of it, as long as it likes: vLLM's keep them until all of
    a module is there. On CPU fresh memory costs more than the copy into it (the system clears every
    page first); torch's allocator for CUDA reuses memory itself.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._free: list[np.ndarray] = []  # bytes, each the whole of one allocation

    @property
    def kept_bytes(self) -> int:
        """Memory that nobody refers to and that serves the next tensors."""
        return sum(memory.size for memory in self._free)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of `shape` with arbitrary contents."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape) * self.dtype.itemsize
        # torch keeps a reference to this very array until the last view of the tensor is gone.
        memory = self._memory(size)
        lease = memory[:size]
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.from_numpy(lease).view(self.dtype).view(shape)

    def _memory(self, size: int) -> np.ndarray:
        """The smallest free memory that is large enough and not twice that; else new memory.

        New memory takes the place of a free one.
        """
        fitting = [
            place for place, memory in enumerate(self._free) if size <= memory.size <= 2 * size
        ]
        if fitting:
            return self._free.pop(min(fitting, key=lambda place: self._free[place].size))
        if self._free:
            self._free.pop()
        return np.empty(size, np.uint8)
