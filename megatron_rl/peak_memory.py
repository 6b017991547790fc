"""The most memory that this process has held at once since a moment."""

import math
from pathlib import Path

import torch


class PeakMemory:
    """Peak bytes since the last `reset`: allocated on a CUDA device, else resident on the host.

    What both the actor and the engine hold counts, for they share the process. Without CUDA it
    needs a Linux that lets a process forget its peak (/proc/self/clear_refs); elsewhere the peak
    is nan.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._known = True
        self._past, self._given_back = 0.0, 0

    def reset(self) -> None:
        """Forget the peak so far."""
        self._past = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._known = False

    def count_without(self, given_back: int) -> None:
        """Leave out so many bytes from now on: a sleeping engine's, which torch still counts."""
        peak = self.peak()
        self.reset()
        self._past, self._given_back = peak, given_back

    def now(self) -> int:
        """Bytes held at this moment."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._given_back
        return _resident("VmRSS")

    def peak(self) -> float:
        """The most bytes held at once since the last `reset`."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device) - self._given_back
            return max(self._past, float(most))
        return float(_resident("VmHWM")) if self._known else math.nan


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024
