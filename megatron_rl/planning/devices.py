"""Kinds of GPUs: what their vendor states, and what of it is used.

Sources, all of the vendor: data sheets of A100 (80GB SXM), H100 (SXM5), H200 (SXM), L40S, B200 in
DGX B200; H20 of NVIDIA's product brief (148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s).
TFLOP/s are of dense bfloat16; a link's rate is that of one direction, half of what data
sheets state. The network is the usual one of such nodes, one adapter per device: 200 Gb/s
beside A100, 400 Gb/s later.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One GPU, and what joins it to others."""

    name: str
    memory_gib: float  # that torch reports
    tflops: float  # 10^12 / s
    memory_gb_s: float  # 10^9 bytes / s, as all rates below
    link_gb_s: float  # to the other devices of its node, one direction
    network_gb_s: float  # its share of the node's network, one direction
    host_gb_s: float  # to the host's memory, one direction
    per_node: int = 8

    @property
    def memory(self) -> int:
        """Bytes."""
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
    """The device of this name; ValueError names those that are known."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ValueError(f"--device {name}: unknown; these are known: {', '.join(DEVICES)}")
    return device
