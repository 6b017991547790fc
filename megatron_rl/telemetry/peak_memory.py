"""Peak memory of this process since the last reset."""

import math
from pathlib import Path

import torch


class PeakMemory:
    """Peak bytes since the last `reset`: allocated on a CUDA device, else resident on the host.

    Includes both the actor and the engine, which share the process. Without CUDA it requires Linux
    with a writable /proc/self/clear_refs; otherwise the peak is nan.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._can_reset = True
        self._earlier_peak, self._released = 0.0, 0

    def reset(self) -> None:
        """Reset the peak to the memory in use now."""
        self._earlier_peak = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            self._can_reset = False

    def count_without(self, released: int) -> None:
        """Subtract bytes from now on: those of a sleeping engine, which torch still counts."""
        peak = self.peak()
        self.reset()
        self._earlier_peak, self._released = peak, released

    def now(self) -> int:
        """Return the bytes in use now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._released
        return _resident("VmRSS")

    def peak(self) -> float:
        """Return the peak bytes in use since the last `reset`."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self._released
            return max(self._earlier_peak, float(peak))
        return float(_resident("VmHWM")) if self._can_reset else math.nan


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{field}:")[1].split()[0]) * 1024
