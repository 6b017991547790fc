"""Measure the weight push: gather-everything and the plan side by side, and project real clusters.

    python tools/benchmarks/resharding.py bytes                    every layout of 8 processes
    python tools/benchmarks/resharding.py time 100M 2,2,2:2 4,1,2:1
                                                tensor,pipeline,data:vLLM tensor, one or more
    python tools/benchmarks/resharding.py project                  7B to 235B on clusters

`time` starts gloo processes on this machine. The receiver copies what each rank needs out of the
tensors it is given, as vLLM's loaders do, and drops it (`direct`: slices are written into an
engine's own parameters, as on CUDA); the exchange is that of training.
"""

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed.topology import Topology
from megatron_rl.resharding.architectures import ExpertShape, ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import padded_vocabulary
from megatron_rl.resharding.plan import iterate_copies
from megatron_rl.resharding.push import gather_push
from megatron_rl.resharding.resharder import Resharder, ReshardSettings
from megatron_rl.resharding.source import parameter_shapes

BUCKET = 16 << 20


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
    for tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=2):
        if tensor * pipeline > 8:
            continue
        source = ActorLayout(tensor=tensor, pipeline=pipeline, data=8 // (tensor * pipeline))
        for engine in (1, 2, 4, 8):
            destination = EngineLayout(engine, 8)
            copies = iterate_copies(shape, source, destination)
            sent = 4 * sum(copy.size for copy in copies if copy.source != copy.destination)
            bound = 4 * lower_bound(shape, source, destination)
            assert sent == bound, f"{source} {destination}: {sent} bytes, bound {bound}"
            name = f"{tensor} x {pipeline} x {source.data}"
            print(f"| {name} | {engine} | 7.00 | {sent / total:.2f} | {bound / total:.2f} |")


class _Receiver:
    """Copies the slices this rank needs out of each tensor, one after the other."""

    def __init__(self, shape: ModelShape, layout: EngineLayout, rank: int) -> None:
        self.layout, self.dtype = layout, torch.float32
        self.pieces = defaultdict(list)
        for piece in layout.pieces(shape, rank=rank):
            self.pieces[piece.tensor].append(piece)
        largest = max(sum(p.size for p in pieces) for pieces in self.pieces.values())
        self.memory = torch.zeros(largest)

    def receive(self, weights, *, version: int) -> float:
        for name, tensor in weights:
            for piece in self.pieces[name]:
                source = piece.of_tensor(tensor)
                self.memory[: piece.size].view(source.shape).copy_(source)
        return 0.0

    def live_parameters(self) -> None:
        return None

    def invalidate(self) -> None: ...


class _Live(_Receiver):
    """An engine whose own parameters are written."""

    def __init__(self, shape: ModelShape, layout: EngineLayout, rank: int) -> None:
        super().__init__(shape, layout, rank)
        sizes = layout.parameter_shapes(shape, rank=rank)
        self.live = {name: torch.zeros(size) for name, size in sizes.items()}

    def live_parameters(self):
        return self.live

    def overwrite(self, write, *, version: int) -> float:
        write()
        return 0.0


class _Holder:
    """Random shards of the size a Megatron rank holds."""

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
            self.parameters[name] = torch.randn(rows if vocabulary else size[0], size[1])

    def named_parameters_local(self):
        return self.parameters


def _peak_memory(reset: bool = False) -> int:
    """Peak resident bytes of this process since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024


def _measure(rank: int, world_size: int, init: str, size: str, actor: list[int], engine: int, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    shape = SHAPES[size]
    layout = ActorLayout(tensor=actor[0], pipeline=actor[1], data=actor[2])
    holder = _Holder(shape, layout, rank)
    receiver = _Receiver(shape, EngineLayout(engine, world_size), rank)
    settings = ReshardSettings(bucket_bytes=BUCKET, full_check_every=0)
    resharder = Resharder(receiver, settings)
    pushes = {
        "gather": lambda: gather_push(holder, receiver, version=0),
        "plan": lambda: resharder.push(holder, version=0),
    }
    if count_parameters(shape) < 200e6:  # eight engines' own parameters need memory too
        direct = Resharder(_Live(shape, EngineLayout(engine, world_size), rank), settings)
        pushes["plan, direct"] = lambda: direct.push(holder, version=0)
    results = {}
    for name, push in pushes.items():
        push()  # the first one also plans, checks in full and connects
        best = None
        for _ in range(3):
            dist.barrier()
            before = _peak_memory(reset=True)
            start = time.perf_counter()
            stats = push()
            dist.barrier()
            seconds = time.perf_counter() - start
            peak = _peak_memory() - before
            if best is None or seconds < best[0]:
                best = (seconds, stats.bytes_sent, peak, dict(stats.phases))
        results[name] = best
    everyone: list[dict] = [{} for _ in range(world_size)]
    dist.all_gather_object(everyone, results)
    if rank == 0:
        out.put(everyone)
    dist.barrier()
    dist.destroy_process_group()


def print_times(size: str, cases: list[str]) -> None:
    """Seconds of both ways for some layouts, on gloo processes of this machine."""
    print(f"{size} in float32, buckets of {BUCKET >> 20} MiB, best of 3, slowest rank")
    print("| actor tp x pp x dp | vLLM tp | way | MB sent | seconds | of which | peak extra MB |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        layout, engine = case.split(":")
        actor = [int(part) for part in layout.split(",")]
        world_size = actor[0] * actor[1] * actor[2]
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            init = f"file://{folder}/store"
            arguments = (world_size, init, size, actor, int(engine), queue)
            ranks = [
                context.Process(target=_measure, args=(rank, *arguments))
                for rank in range(world_size)
            ]
            for process in ranks:
                process.start()
            everyone = queue.get(timeout=300)
            for process in ranks:
                process.join()
        for way in everyone[0]:
            seconds = max(each[way][0] for each in everyone)
            peak = max(each[way][2] for each in everyone)
            phases = {
                phase: max(each[way][3].get(phase, 0.0) for each in everyone)
                for phase in everyone[0][way][3]
            }
            detail = " ".join(f"{phase} {value:.3f}" for phase, value in phases.items())
            print(
                f"| {' x '.join(map(str, actor))} | {engine} | {way} "
                f"| {everyone[0][way][1] / 1e6:.1f} | {seconds:.3f} "
                f"| {detail} | {peak / 1e6:.0f} |",
                flush=True,
            )


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
    timed.add_argument("cases", nargs="+", metavar="TENSOR,PIPELINE,DATA:ENGINE")
    commands.add_parser("project")
    arguments = parser.parse_args()
    if arguments.command == "bytes":
        print_bytes(arguments.size)
    elif arguments.command == "time":
        print_times(arguments.size, arguments.cases)
    else:
        project()


if __name__ == "__main__":
    main()
