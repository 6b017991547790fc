"""Remove the CUDA kernels of other architectures from the shared objects of wheels.

    python tools/slim_wheels.py --compute-capability 9.0 WHEEL ...

A shared object has its kernels in containers of the section `.nv_fatbin`; a container has one entry
per architecture (cubin) or virtual architecture (PTX). If one of its cubins runs on the wanted
capability, the container keeps only those: they move to its front, its size shrinks, and zeros
follow, which a wheel compresses to almost nothing. Containers stay where they are, so the installed
size is the same. A container without such a cubin stays whole: the driver compiles its PTX. The
header of an entry is that of https://github.com/n-eiling/cuda-fatbin-decompression; an unknown one
is an error. NVIDIA's cuobjdump lists the same entries before and after (libnvjpeg 12.4).
"""

import argparse
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTAINER, MAGIC = struct.Struct("<IHHQ"), 0xBA55ED50  # magic, version, header bytes, body bytes
ENTRY = struct.Struct(
    "<HHIQIIHHI"
)  # kind, -, header bytes, payload bytes, -, -, -, -, architecture
PTX, CUBIN = 1, 2


@dataclass(frozen=True)
class Entry:
    """One entry of a container: kind, architecture (90 for 9.0), and its bytes with the header."""

    kind: int
    architecture: int
    start: int
    end: int


@dataclass(frozen=True)
class Container:
    """A container from its header at `start` to `end`, and the entries in it."""

    start: int
    end: int
    entries: tuple[Entry, ...]


def fatbin_section(data: bytes | bytearray) -> tuple[int, int]:
    """Start and end of `.nv_fatbin` in a 64-bit little-endian ELF file; (0, 0) if it has none."""
    if data[:6] != b"\x7fELF\x02\x01":
        return 0, 0
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        begin = headers[names][4] + name
        if data[begin : begin + 11] == b".nv_fatbin\0":
            return offset, offset + length
    return 0, 0


def containers(data: bytes | bytearray) -> Iterator[Container]:
    """Containers of a shared object; raises ValueError for an unknown layout."""
    place, end = fatbin_section(data)
    while place + CONTAINER.size <= end:
        magic, _, header, body = CONTAINER.unpack_from(data, place)
        if magic != MAGIC:
            place += 8  # containers are aligned; zeros lie between them
            continue
        inside, stop, entries = place + header, place + header + body, []
        if stop > end:
            raise ValueError(f"the container at byte {place} ends behind its section")
        while inside + ENTRY.size <= stop:
            kind, _, size, payload, *_, architecture = ENTRY.unpack_from(data, inside)
            following = inside + size + payload
            if kind not in (PTX, CUBIN) or size < ENTRY.size or following > stop:
                raise ValueError(f"unknown entry of kind {kind} at byte {inside}")
            entries.append(Entry(kind, architecture, inside, following))
            inside = following
        yield Container(place, stop, tuple(entries))
        place = stop


def loadable(entries: tuple[Entry, ...], capability: int) -> list[Entry]:
    """Cubins that run on a device: of its major version, and not of a later minor one."""
    return [
        one
        for one in entries
        if one.kind == CUBIN
        and one.architecture // 10 == capability // 10
        and one.architecture <= capability
    ]


def slim(data: bytearray, capability: int) -> int:
    """Keep a device's cubins in each container that has any; return the bytes of the others."""
    dropped = 0
    for one in list(containers(data)):
        own = loadable(one.entries, capability)
        if not own or len(own) == len(one.entries):
            continue
        kept = b"".join(data[entry.start : entry.end] for entry in own)
        magic, version, header, _ = CONTAINER.unpack_from(data, one.start)
        CONTAINER.pack_into(data, one.start, magic, version, header, len(kept))
        begin = one.start + header
        data[begin : one.end] = kept + bytes(one.end - begin - len(kept))
        dropped += one.end - begin - len(kept)
    return dropped


def slim_wheel(wheel: Path, capability: int) -> int:
    """Slim all shared objects of a wheel and pack it again; return the bytes of dropped kernels.

    Extracted without comparing hashes, as pip does: a published wheel of NVIDIA's has wrong ones.
    """
    total = 0
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as archive:
        if not any(".so" in name for name in archive.namelist()):
            return 0
        for member in archive.infolist():
            path = Path(archive.extract(member, temporary))
            if path.is_file() and (mode := member.external_attr >> 16 & 0o777):
                path.chmod(mode)
        for file in Path(temporary).rglob("*.so*"):
            data = bytearray(file.read_bytes())
            dropped = slim(data, capability)
            if dropped:
                file.write_bytes(data)
                total += dropped
        if total:  # writes hashes of the changed files
            pack = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(wheel.parent)]
            subprocess.run([*pack, temporary], check=True, stdout=subprocess.DEVNULL)
    return total


def parse_capability(text: str) -> int:
    """Read a compute capability such as 9.0 as 90."""
    major, _, minor = text.partition(".")
    return 10 * int(major) + int(minor or 0)


def main() -> None:
    """Slim the wheels and print what each lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compute-capability", type=parse_capability, required=True)
    parser.add_argument("wheels", nargs="+", type=Path)
    arguments = parser.parse_args()
    for wheel in arguments.wheels:
        before = wheel.stat().st_size
        dropped = slim_wheel(wheel, arguments.compute_capability)
        if dropped:
            after = wheel.stat().st_size
            print(f"{wheel.name}: {before / 2**20:.0f} -> {after / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
