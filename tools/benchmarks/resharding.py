"""Measure the weight push: gather-everything and the plan side by side, and project real clusters.

    python tools/benchmarks/resharding.py bytes               every layout of 8 processes
    python tools/benchmarks/resharding.py time 10M            seconds of every layout
    python tools/benchmarks/resharding.py time 100M 2,2,2:2 4,2,1:1 --dtype bfloat16
                                              tensor,pipeline,data:vLLM tensor, one or more
    python tools/benchmarks/resharding.py project             7B to 235B on clusters

`time` starts 8 gloo processes on this machine. Each has its shards of the actor and its share of an
engine's parameters, and takes turns: `gather` and `plan` hand tensors to a loader that copies what
the rank needs of each into the engine's parameters, as vLLM's loaders do; `direct` writes slices
into the same parameters without one, as on CUDA. The exchange is that of training.
"""

import argparse
import itertools
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_rl.distributed.topology import Topology
from megatron_rl.peak_memory import PeakMemory
from megatron_rl.resharding.architectures import ExpertShape, ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import padded_vocabulary
from megatron_rl.resharding.plan import iterate_copies
from megatron_rl.resharding.push import gather_push
from megatron_rl.resharding.resharder import Resharder, ReshardSettings
from megatron_rl.resharding.source import SyncStats, parameter_shapes

WORLD_SIZE = 8


def _shape(layers: int, hidden: int, ffn: int, vocabulary: int, **changes) -> ModelShape:
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
    "1M": _shape(8, 96, 256, 1024),
    "10M": _shape(8, 256, 768, 4096),
    "100M": _shape(16, 640, 1920, 16384),
    "500M": _shape(24, 1216, 3584, 24576),
}
_QWEN = {"num_query_groups": 4, "head_dim": 128}
_MOE = _QWEN | {"architecture": "Qwen3MoeForCausalLM"}
CLUSTERS = [  # name, shape, actor layout, engine layout, ranks per node
    (
        "7B dense, 8 GPUs",
        _shape(28, 3584, 18944, 152064, num_attention_heads=28, **_QWEN),
        ActorLayout(tensor=4, data=2),
        EngineLayout(2, 8),
        8,
    ),
    (
        "7B dense, 16 GPUs",
        _shape(28, 3584, 18944, 152064, num_attention_heads=28, **_QWEN),
        ActorLayout(tensor=4, pipeline=2, data=2),
        EngineLayout(2, 16),
        8,
    ),
    (
        "30B-A3B MoE, 8 GPUs",
        _shape(
            48, 2048, 6144, 151936, num_attention_heads=32,
            experts=ExpertShape(128, 8, 768, True), **_MOE,
        ),
        ActorLayout(tensor=2, data=4, expert=4, expert_tensor=1),
        EngineLayout(4, 8, expert_parallel=True),
        8,
    ),
    (
        "235B-A22B MoE, 64 GPUs",
        _shape(
            94, 4096, 12288, 151936, num_attention_heads=64,
            experts=ExpertShape(128, 8, 1536, True), **_MOE,
        ),
        ActorLayout(tensor=4, pipeline=2, data=8, expert=8, expert_tensor=1),
        EngineLayout(8, 64, expert_parallel=True),
        8,
    ),
]  # fmt: skip


def count_parameters(shape: ModelShape) -> int:
    """Elements of all HF tensors."""
    return sum(torch.Size(size).numel() for size in tensor_shapes(shape).values())


def lower_bound(shape: ModelShape, source: ActorLayout, destination: EngineLayout) -> int:
    """Elements that ranks need and do not hold, from the rectangles alone, without the plan."""
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
    """Bytes of both ways, and the bound, for every layout of 8 processes."""
    shape = SHAPES[size]
    total = count_parameters(shape) * 4
    print(f"{size}: {total / 1e6:.1f} MB in float32; sent over all ranks, in units of the model")
    print("| actor tp x pp x dp | vLLM tp | gather | plan | bound |\n|---|---|---|---|---|")
    for source, engine in all_cases():
        destination = EngineLayout(engine, WORLD_SIZE)
        copies = iterate_copies(shape, source, destination)
        sent = 4 * sum(copy.size for copy in copies if copy.source != copy.destination)
        bound = 4 * lower_bound(shape, source, destination)
        assert sent == bound, f"{source} {destination}: {sent} bytes, bound {bound}"
        name = f"{source.tensor} x {source.pipeline} x {source.data}"
        print(f"| {name} | {engine} | 7.00 | {sent / total:.2f} | {bound / total:.2f} |")


class _Engine:
    """One rank's parameters of an engine, and a loader as vLLM's: it copies out what it needs."""

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
    """Shards of the size that a Megatron rank holds, in float32."""

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
    """One push: the slowest rank's seconds and transfer, the largest peak, all bytes."""

    seconds: float
    transfer: float
    peak: float
    bytes_sent: int


@dataclass(frozen=True)
class Options:
    """What a table of seconds is measured with."""

    size: str
    dtype: torch.dtype
    bucket_mib: int
    repeats: int
    verbose: bool


Case = tuple[ActorLayout, int]
WAYS = ("gather", "plan", "direct")


def _measure(case: Case, rank: int, options: Options) -> dict[str, Measured]:
    """Every way of pushing in one layout, taking turns; the best of `repeats` of each."""
    shape = SHAPES[options.size]
    holder = _Holder(shape, case[0], rank)
    engine = _Engine(shape, EngineLayout(case[1], WORLD_SIZE), rank, options.dtype)
    settings = ReshardSettings(bucket_bytes=options.bucket_mib << 20, full_check_every=0)
    resharders = {way: Resharder(engine, settings) for way in WAYS}
    memory = PeakMemory()
    best: dict[str, Measured] = {}
    for number in range(
        1 + options.repeats
    ):  # the first one also plans, checks in full and connects
        for way in WAYS:
            engine.direct, resharder = way == "direct", resharders[way]
            dist.barrier()
            memory.reset()
            # What the plan keeps for its next push is memory that it needs.
            before = memory.now() - resharder.kept_bytes
            before_usage = resource.getrusage(resource.RUSAGE_SELF)
            start = time.perf_counter()
            if way == "gather":
                stats = gather_push(holder, engine, version=0)
            else:
                stats = resharder.push(holder, version=0)
            dist.barrier()
            seconds = time.perf_counter() - start
            peak = memory.peak() - before
            everyone: list[Measured] = [None] * WORLD_SIZE
            dist.all_gather_object(
                everyone,
                Measured(seconds, stats.phases.get("transfer", 0.0), peak, stats.bytes_sent),
            )
            slowest = Measured(
                *(max(values) for values in zip(*map(astuple, everyone), strict=True))
            )
            if number == 1 or (number and slowest.seconds < best[way].seconds):
                best[way] = slowest
            if options.verbose and number:
                _print_details(way, stats, before_usage)
    return best


def _print_details(way: str, stats: SyncStats, before: resource.struct_rusage) -> None:
    """All ranks' processor time and page faults, rank 0's phases: less sensitive to other load."""
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
    """Every actor tensor x pipeline x data with every engine that 8 processes allow."""
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
    """Seconds of all ways for some layouts, on gloo processes of this machine."""
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


def project() -> None:
    """Bytes that each rank sends and receives, per kind of link, on real clusters in bfloat16.

    Bytes are linear in the layers of a stage, so two small plans give those of the whole model.
    """
    print("GB of the busiest rank; seconds at 300 GB/s within a node and 40 GB/s between nodes")
    print("| model | actor | engines | model GB | gather GB in | plan GB in | between nodes | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, shape, source, destination, node in CLUSTERS:
        one, two = (
            _bytes_by_link(shape, source, destination, node, layers=source.pipeline * count)
            for count in (1, 2)
        )
        stage_layers = shape.num_layers // source.pipeline
        within, between = (
            max(a + (b - a) * (stage_layers - 1) for a, b in zip(one[k], two[k], strict=True))
            for k in (0, 1)
        )
        total = _extrapolated_parameters(shape) * 2
        seconds = max(within / 300e9, between / 40e9)
        print(
            f"| {name} | {str(source)[6:]} | {str(destination)[5:]} | {total / 1e9:.1f} "
            f"| {total / 1e9:.1f} | {(within + between) / 1e9:.2f} | {between / 1e9:.2f} "
            f"| {seconds:.3f} |",
            flush=True,
        )


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    return ModelShape(**(vars(shape) | {"num_layers": layers}))


def _extrapolated_parameters(shape: ModelShape) -> int:
    one, two = (count_parameters(_with_layers(shape, layers)) for layers in (1, 2))
    return one + (two - one) * (shape.num_layers - 1)


def _bytes_by_link(shape, source, destination, node, *, layers) -> tuple[list[int], list[int]]:
    """Bytes per rank, the larger of sent and received, within a node and between nodes."""
    traffic = [[[0] * source.world_size for _ in range(2)] for _ in range(2)]  # [link][direction]
    for copy in iterate_copies(
        _with_layers(shape, layers), source, destination, ranks_per_node=node
    ):
        if copy.source == copy.destination:
            continue
        link = int(copy.source // node != copy.destination // node)
        traffic[link][0][copy.source] += 2 * copy.size
        traffic[link][1][copy.destination] += 2 * copy.size
    within, between = ([max(pair) for pair in zip(*link, strict=True)] for link in traffic)
    return within, between


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
    timed.add_argument("--verbose", action="store_true", help="phases of every push")
    commands.add_parser("project")
    arguments = parser.parse_args()
    if arguments.command == "bytes":
        print_bytes(arguments.size)
    elif arguments.command == "time":
        options = Options(
            arguments.size,
            getattr(torch, arguments.dtype),
            arguments.bucket_mib,
            arguments.repeats,
            arguments.verbose,
        )
        print_times(arguments.cases or all_cases(), options)
    else:
        project()


if __name__ == "__main__":
    main()
