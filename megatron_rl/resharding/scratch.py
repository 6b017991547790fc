"""Memory of a push, kept for the next: what is on the wire, and tensors on the way to a loader.

On CPU fresh memory costs more than the copy into it, for the system clears every page first.
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """Two flat buffers for the wire, and tensors whose memory serves others of the same size.

    A loader may keep a tensor, or a view of it, as long as it likes: vLLM's keep them until all of
    a module is there. Tensors that nobody refers to are kept only within `limit` bytes of tensors
    in use and kept. A model's layers ask for the same sizes again and again. torch's allocator for
    CUDA reuses memory itself.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, limit: int) -> None:
        self.dtype, self.device, self.limit = dtype, device, limit
        self.bytes_in_use = 0  # by tensors
        # Each the whole of one tensor, oldest first; malloc would keep some of what is let go.
        self._free: list[mmap.mmap] = []
        self._wire: list[Tensor | None] = [None, None]

    @property
    def bytes_free(self) -> int:
        """Memory of tensors that nobody refers to."""
        return sum(map(len, self._free))

    def wire(self, number: int, size: int) -> Tensor:
        """The buffer of round `number`, at least [size] bytes, which every second round shares."""
        buffer = self._wire[number % 2]
        if buffer is None or buffer.numel() < size:
            self._wire[number % 2] = None  # before the larger one is there
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._wire[number % 2] = buffer
        return buffer

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of `shape` with arbitrary contents."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape) * self.dtype.itemsize
        memory = self._memory(size)
        self.bytes_in_use += size
        # torch keeps a reference to this very array until the last view of the tensor is gone.
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, self._take_back, memory).atexit = False
        return torch.from_numpy(lease).view(self.dtype).view(shape)

    def _memory(self, size: int) -> mmap.mmap:
        for place, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(place)
        self._keep_within(self.limit - size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _take_back(self, memory: mmap.mmap) -> None:
        self.bytes_in_use -= len(memory)
        self._free.append(memory)
        self._keep_within(self.limit)

    def _keep_within(self, limit: int) -> None:
        """Let go of the oldest free memory until all of it, with that in use, is within `limit`."""
        while self._free and self.bytes_in_use + self.bytes_free > limit:
            self._free.pop(0)
