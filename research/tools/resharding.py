"""Measure the weight push: gathering all weights against the push schedule.

    python -m research.tools.resharding bytes               every layout of 8 processes
    python -m research.tools.resharding time 10M            seconds of every layout
    python -m research.tools.resharding time 100M 2,2,2:2 4,2,1:1 --dtype bfloat16
                                              tensor,pipeline,data:vLLM tensor, one or more

`time` starts 8 gloo processes on this machine, each with its shards of the actor and of an engine's
parameters. `gather` and `plan` pass tensors to a loader that copies the rank's part into the
engine's parameters, as vLLM's loaders do. `direct` writes slices into the same parameters without a
loader, as on CUDA. The transfer code is that of training.
"""

import argparse
import ctypes
import itertools
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_rl.config.sections import ReshardingSection
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import padded_vocabulary, parameter_shapes
from megatron_rl.resharding.push import Resharder, SyncStats
from megatron_rl.resharding.push_schedule import WITHIN, plan_slices
from megatron_rl.telemetry.metrics import PeakMemory
from tests.gather_push import gather_push

WORLD_SIZE = 8


def make_shape(layers: int, hidden: int, ffn: int, vocabulary: int, **changes) -> ModelShape:
    sizes = {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "head_dim": hidden // 8,
        "ffn_hidden_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rotary_base": 1e6,
        "norm_epsilon": 1e-6,
        "tied_embeddings": False,
    }
    return ModelShape(**(sizes | changes))


SHAPES = {
    "1M": make_shape(8, 96, 256, 1024),
    "10M": make_shape(8, 256, 768, 4096),
    "100M": make_shape(16, 640, 1920, 16384),
    "500M": make_shape(24, 1216, 3584, 24576),
}


def count_parameters(shape: ModelShape) -> int:
    """Count the elements of all HF tensors."""
    return sum(torch.Size(size).numel() for size in tensor_shapes(shape).values())


def lower_bound(shape: ModelShape, source: ActorLayout, destination: EngineLayout) -> int:
    """Count the elements that ranks need and do not have, from the rectangles, without the plan."""
    missing = 0
    for rank in range(source.world_size):
        held = defaultdict(list)
        for piece in source.pieces(shape, rank=rank):
            held[piece.tensor].append(piece)
        for need in destination.pieces(shape, rank=rank):
            own = {(piece.rows, piece.columns) for piece in held[need.tensor]}
            covered = sum(_overlap(need.rows, r) * _overlap(need.columns, c) for r, c in own)
            missing += need.size - covered
    return missing


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def print_bytes(size: str) -> None:
    """Print the bytes of both methods and the lower bound for every layout of 8 processes."""
    shape = SHAPES[size]
    total = count_parameters(shape) * 4
    print(f"{size}: {total / 1e6:.1f} MB in float32; sent over all ranks, in units of the model")
    print("| actor tp x pp x dp | vLLM tp | gather | plan | bound |\n|---|---|---|---|---|")
    for source, engine in all_cases():
        destination = EngineLayout(engine, WORLD_SIZE)
        sent = 0
        for slices in plan_slices(shape, source, destination).values():
            sent += sum(4 * s.size * len(s.destinations) for s in slices if s.source != WITHIN)
        bound = 4 * lower_bound(shape, source, destination)
        assert sent == bound, f"{source} {destination}: {sent} bytes, bound {bound}"
        name = f"{source.tensor} x {source.pipeline} x {source.data}"
        print(f"| {name} | {engine} | 7.00 | {sent / total:.2f} | {bound / total:.2f} |")


class _Engine:
    """Engine parameters of one rank, and a loader like vLLM's that copies the rank's part."""

    def __init__(
        self, shape: ModelShape, layout: EngineLayout, rank: int, dtype: torch.dtype
    ) -> None:
        self.layout, self.dtype, self.direct = layout, dtype, False
        self.pieces = defaultdict(list)
        for piece in layout.pieces(shape, rank=rank):
            self.pieces[piece.tensor].append(piece)
        sizes = layout.parameter_shapes(shape, rank=rank)
        self.parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}

    def receive(self, weights, *, version: int) -> float:
        for name, tensor in weights:
            for piece in self.pieces[name]:
                target = piece.of_parameter(self.parameters[piece.parameter])
                target.copy_(piece.of_tensor(tensor))
        return 0.0

    def check_idle(self) -> None: ...

    def live_parameters(self):
        return self.parameters if self.direct else None

    def overwrite(self, write, *, version: int) -> float:
        write()
        return 0.0

    def invalidate(self) -> None: ...


class _Holder:
    """Shards in float32 with the sizes of a Megatron rank."""

    def __init__(self, shape: ModelShape, layout: ActorLayout, rank: int) -> None:
        self.shape = shape
        self.topology = Topology(
            world_size=layout.world_size,
            rank=rank,
            tp_size=layout.tensor,
            pp_size=layout.pipeline,
            dp_size=layout.data,
        )
        rows = padded_vocabulary(shape.vocab_size, tp_size=layout.tensor) // layout.tensor
        self.parameters = {}
        for name, size in parameter_shapes(layout.pieces(shape, rank=rank)).items():
            vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            height = rows if vocabulary else size[0]
            self.parameters[name] = torch.full((height, size[1]), float(rank))  # touched memory

    def named_parameters_local(self):
        return self.parameters


@dataclass
class Measured:
    """Statistics of one push: the slowest rank's times, the largest peak, all bytes."""

    seconds: float
    transfer: float
    peak: float
    bytes_sent: int


@dataclass(frozen=True)
class Options:
    """Options of a time measurement."""

    size: str
    dtype: torch.dtype
    bucket_mib: int
    repeats: int
    verbose: bool


Case = tuple[ActorLayout, int]
WAYS = ("gather", "plan", "direct")


def _start_of(memory: PeakMemory) -> int:
    """Return the allocated bytes, after emptying the allocator's cache."""
    ctypes.CDLL(None).malloc_trim(0)
    memory.reset()
    return memory.now()


def _measure(case: Case, rank: int, options: Options) -> dict[str, Measured]:
    """Measure every method in one layout in turn; return the best of `repeats` for each."""
    shape = SHAPES[options.size]
    holder = _Holder(shape, case[0], rank)
    engine = _Engine(shape, EngineLayout(case[1], WORLD_SIZE), rank, options.dtype)
    settings = ReshardingSection(bucket_mib=options.bucket_mib)
    memory = PeakMemory()

    def push(way: str, resharder: Resharder) -> tuple[float, SyncStats]:
        engine.direct = way == "direct"
        dist.barrier()
        start = time.perf_counter()
        if way == "gather":
            stats = gather_push(holder, engine, version=0)
        else:
            stats = resharder.push(holder, version=0)
        dist.barrier()
        return time.perf_counter() - start, stats

    peaks: dict[str, float] = {}
    resharders: dict[str, Resharder] = {}
    push("direct", Resharder(engine, settings))  # connects all ranks
    for way in WAYS:
        resharders[way] = Resharder(engine, settings)
        before = _start_of(memory)
        for _ in range(2):  # the first one plans and checks every slice
            push(way, resharders[way])
        peaks[way] = memory.peak() - before
    best: dict[str, Measured] = {}
    for _ in range(options.repeats):
        for way in WAYS:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            seconds, stats = push(way, resharders[way])
            mine = Measured(
                seconds, stats.phases.get("transfer", 0.0), peaks[way], stats.bytes_sent
            )
            everyone: list[Measured] = [mine] * WORLD_SIZE
            dist.all_gather_object(everyone, mine)
            slowest = Measured(*(max(each) for each in zip(*map(astuple, everyone), strict=True)))
            if way not in best or slowest.seconds < best[way].seconds:
                best[way] = slowest
            if options.verbose:
                _print_details(way, stats, usage)
    return best


def _print_details(way: str, stats: SyncStats, before: resource.struct_rusage) -> None:
    """Print all ranks' processor time and page faults, and rank 0's phases."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    names = ("ru_utime", "ru_stime", "ru_minflt")
    used = torch.tensor([getattr(now, name) - getattr(before, name) for name in names])
    dist.reduce(used, 0)
    if dist.get_rank() == 0:
        phases = " ".join(f"{k} {v:.3f}" for k, v in stats.phases.items())
        user, system, faults = used.tolist()
        print(f"# {way} {stats.seconds:.3f} s; processor {user:.2f} + {system:.2f} s, "
              f"{faults:.0f} page faults; {phases}", flush=True)  # fmt: skip


def _run_rank(rank: int, init: str, cases: list[Case], options: Options) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD_SIZE)
    for case in cases:
        ways = _measure(case, rank, options)
        if rank == 0:
            print(_table_row(case, ways), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _table_row(case: Case, ways: dict[str, Measured]) -> str:
    layout, engine = case
    cells = [f"{layout.tensor} x {layout.pipeline} x {layout.data}", str(engine)]
    cells += [f"{ways[way].bytes_sent / 1e6:.0f}" for way in WAYS[:2]]
    cells += [f"{ways[way].seconds:.3f}" for way in WAYS]
    cells += [f"{ways[way].transfer:.3f}" for way in WAYS]
    cells += [f"{ways[way].peak / 1e6:.0f}" for way in WAYS]
    return f"| {' | '.join(cells)} |"


def all_cases() -> list[Case]:
    """Return all actor and engine layouts of 8 processes."""
    sizes = [1, 2, 4, 8]
    return [
        (ActorLayout(tensor=tensor, pipeline=pipeline, data=WORLD_SIZE // (tensor * pipeline)), tp)
        for tensor, pipeline in itertools.product(sizes, repeat=2)
        if tensor * pipeline <= WORLD_SIZE
        for tp in sizes
    ]


def _parse_case(text: str) -> Case:
    layout, engine = text.split(":")
    tensor, pipeline, data = (int(part) for part in layout.split(","))
    return ActorLayout(tensor=tensor, pipeline=pipeline, data=data), int(engine)


def print_times(cases: list[Case], options: Options) -> None:
    """Measure the seconds of all methods for some layouts, on gloo processes of this machine."""
    name = str(options.dtype).removeprefix("torch.")
    print(
        f"{options.size}, {WORLD_SIZE} processes, engine in {name}, buckets of "
        f"{options.bucket_mib} MiB, best of {options.repeats}, slowest rank; "
        "g gather, p plan, d plan direct"
    )
    heads = "actor tp x pp x dp,vLLM tp,g MB,p MB,g s,p s,d s"
    heads += ",g transfer,p transfer,d transfer,g peak MB,p peak MB,d peak MB"
    print(f"| {heads.replace(',', ' | ')} |\n|{'---|' * len(heads.split(','))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/store", cases, options)
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=WORLD_SIZE)


def main() -> None:
    """Parse the command line and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("bytes")
    table.add_argument("size", nargs="?", default="1M", choices=SHAPES)
    timed = commands.add_parser("time")
    timed.add_argument("size", choices=SHAPES)
    timed.add_argument("cases", nargs="*", type=_parse_case, metavar="TENSOR,PIPELINE,DATA:ENGINE")
    timed.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    timed.add_argument("--bucket-mib", type=int, default=64)
    timed.add_argument("--repeats", type=int, default=3)
    timed.add_argument("--verbose", action="store_true", help="Print the phases of every push.")
    arguments = parser.parse_args()
    if arguments.command == "bytes":
        print_bytes(arguments.size)
    else:
        options = Options(
            arguments.size,
            getattr(torch, arguments.dtype),
            arguments.bucket_mib,
            arguments.repeats,
            arguments.verbose,
        )
        print_times(arguments.cases or all_cases(), options)


if __name__ == "__main__":
    main()
