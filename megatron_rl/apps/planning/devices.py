"""Specifications of GPU types.

Sources: NVIDIA's data sheets of A100 (80GB SXM), H100 (SXM5), H200 (SXM), L40S and B200 (DGX B200),
and its product brief of H20 (148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s). TFLOP/s are for dense
bfloat16. Link rates are per direction, half of the data sheet's value. The network is typical for
such nodes, with one adapter per device: 200 Gb/s for A100, 400 Gb/s for later devices.
"""

from dataclasses import dataclass

from megatron_rl.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One GPU and its links to the other devices and to the host."""

    name: str
    memory_gib: float  # as torch reports it
    tflops: float  # 10^12 / s
    memory_gb_s: float  # 10^9 bytes / s, as all rates below
    link_gb_s: float  # to the other devices of its node, one direction
    network_gb_s: float  # network bandwidth per device, one direction
    host_gb_s: float  # to the host's memory, one direction
    per_node: int = 8

    @property
    def newer_than_h100(self) -> bool:
        """Whether vLLM prefers kernels for experts that need its loaders."""
        return self.name in ("b200", "gb200")

    @property
    def memory(self) -> int:
        """Device memory in bytes."""
        return int(self.memory_gib * GIB)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40", 39.4, 312, 1555, 300, 25, 25),
        Device("a100", 79.2, 312, 2039, 300, 25, 25),
        Device("l40s", 44.4, 362, 864, 25, 25, 25),
        Device("h20", 95.1, 148, 4000, 450, 50, 50),
        Device("h800", 79.1, 989, 3350, 200, 50, 50),
        Device("h100", 79.1, 989, 3350, 450, 50, 50),
        Device("h200", 139.8, 989, 4800, 450, 50, 50),
        Device("b200", 178.4, 2250, 8000, 900, 50, 50),
        Device("gb200", 184.0, 2500, 8000, 900, 50, 200, per_node=4),
    )
}


def find_device(name: str) -> Device:
    """Return the device with this name; raise UserError with the known names otherwise."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise UserError(f"--device {name}: unknown; choose one of {', '.join(DEVICES)}")
    return device
