"""Project the weight push to real clusters, 7B to 235B: bytes of each rank from the plan itself.

python -m tools.benchmarks.resharding_clusters
"""

from megatron_rl.models.shape import ExpertShape, ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.plan import iterate_copies
from tools.benchmarks.resharding import count_parameters, make_shape

_QWEN = {"num_query_groups": 4, "head_dim": 128}
_MOE = _QWEN | {"architecture": "Qwen3MoeForCausalLM"}
CLUSTERS = [  # name, shape, actor layout, engine layout, ranks per node
    (
        "7B dense, 8 GPUs",
        make_shape(28, 3584, 18944, 152064, num_attention_heads=28, **_QWEN),
        ActorLayout(tensor=4, data=2),
        EngineLayout(2, 8),
        8,
    ),
    (
        "7B dense, 16 GPUs",
        make_shape(28, 3584, 18944, 152064, num_attention_heads=28, **_QWEN),
        ActorLayout(tensor=4, pipeline=2, data=2),
        EngineLayout(2, 16),
        8,
    ),
    (
        "30B-A3B MoE, 8 GPUs",
        make_shape(
            48, 2048, 6144, 151936, num_attention_heads=32,
            experts=ExpertShape(128, 8, 768, True), **_MOE,
        ),
        ActorLayout(data=8, expert=4),
        EngineLayout(4, 8, expert_parallel=True),
        8,
    ),
    (
        "30B-A3B MoE, 8 GPUs",
        make_shape(
            48, 2048, 6144, 151936, num_attention_heads=32,
            experts=ExpertShape(128, 8, 768, True), **_MOE,
        ),
        ActorLayout(tensor=2, data=4, expert=4),
        EngineLayout(4, 8),
        8,
    ),
    (
        "235B-A22B MoE, 64 GPUs",
        make_shape(
            94, 4096, 12288, 151936, num_attention_heads=64,
            experts=ExpertShape(128, 8, 1536, True), **_MOE,
        ),
        ActorLayout(pipeline=2, context=4, data=8, expert=8),
        EngineLayout(8, 64, expert_parallel=True),
        8,
    ),
]  # fmt: skip


def main() -> None:
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


if __name__ == "__main__":
    main()
