"""Reusable memory of a weight transfer: message buffers, and tensors passed to a loader.

On CPU new memory costs more than the copy into it, because the system clears every page first.
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """Two flat message buffers, and tensors whose memory is reused for others of the same size.

    A loader may keep a tensor, or a view of it, for any time: vLLM's loaders keep them until a
    module is complete. Unreferenced memory is kept only while tensors in use and kept stay within
    `limit` bytes. A model's layers repeat the same sizes. On CUDA torch's allocator reuses memory.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, limit: int) -> None:
        self.dtype, self.device, self.limit = dtype, device, limit
        self.bytes_in_use = 0  # by tensors
        # One entry per tensor, oldest first; malloc would retain part of the released memory.
        self._free: list[mmap.mmap] = []
        self._wire: list[Tensor | None] = [None, None]

    @property
    def bytes_free(self) -> int:
        """Bytes of unreferenced tensors."""
        return sum(map(len, self._free))

    def wire(self, number: int, size: int) -> Tensor:
        """Return the buffer of round `number`, at least [size] bytes; two buffers alternate."""
        buffer = self._wire[number % 2]
        if buffer is None or buffer.numel() < size:
            self._wire[number % 2] = None  # released before the larger one is allocated
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._wire[number % 2] = buffer
        return buffer

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` with arbitrary contents."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape) * self.dtype.itemsize
        memory = self._memory(size)
        self.bytes_in_use += size
        # torch references this array until the last view of the tensor is deleted.
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, self._reclaim, memory).atexit = False
        return torch.from_numpy(lease).view(self.dtype).view(shape)

    def _memory(self, size: int) -> mmap.mmap:
        for index, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(index)
        self._keep_within(self.limit - size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _reclaim(self, memory: mmap.mmap) -> None:
        self.bytes_in_use -= len(memory)
        self._free.append(memory)
        self._keep_within(self.limit)

    def _keep_within(self, limit: int) -> None:
        """Release the oldest free memory until free and used memory are within `limit`."""
        while self._free and self.bytes_in_use + self.bytes_free > limit:
            self._free.pop(0)
