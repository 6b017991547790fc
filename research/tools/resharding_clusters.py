"""Project the weight push to clusters, 7B to 235B: bytes per rank from the push schedule.

python -m research.tools.resharding_clusters
"""

import time
from collections import defaultdict

from megatron_rl.models.shape import ExpertShape, ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import SenderTurn, plan_for_rank, schedule
from research.tools.resharding import count_parameters, make_shape

BUCKET = 64 << 20
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
    """Print one row per cluster, in bfloat16: bytes in GB, by rank and kind of link."""
    print("bfloat16; seconds at 300 GB/s within a node and 40 GB/s per rank between nodes")
    heads = "model,actor,engines,model GB,in: most,out: most,out: mean,into a node,between: most"
    heads += ",wire s,messages,peers x rounds,plan s"
    print(f"| {heads.replace(',', ' | ')} |\n|{'---|' * len(heads.split(','))}")
    for name, shape, source, destination, node in CLUSTERS:
        traffic = _Traffic(shape, source, destination, node)
        within, between = traffic.busiest(0), traffic.busiest(1)
        start = time.process_time()
        messages, peers = _messages(shape, source, destination, node)
        seconds = time.process_time() - start
        numbers = [
            count_parameters(shape) * 2, max(traffic.into), max(traffic.out),
            sum(traffic.out) / len(traffic.out), max(traffic.into_node), between,
        ]  # fmt: skip
        print(
            f"| {name} | {str(source)[6:]} | {str(destination)[5:]} | "
            + " | ".join(f"{number / 1e9:.2f}" for number in numbers)
            + f" | {max(within / 300e9, between / 40e9):.3f} | {messages} | {peers} "
            f"| {seconds:.1f} |",
            flush=True,
        )


class _Traffic:
    """Bytes in and out of every rank, within and between nodes."""

    def __init__(
        self, shape: ModelShape, source: ActorLayout, destination: EngineLayout, node: int
    ) -> None:
        world_size = source.world_size
        self.links = [[[0] * world_size for _ in range(2)] for _ in range(2)]  # [link][direction]
        self.into_node = [0] * (world_size // node)
        _, steps = schedule(
            shape, source, destination, wire_elements=BUCKET // 2, ranks_per_node=node
        )
        turns: dict[int, SenderTurn] = {}
        sizes: dict[int, int] = defaultdict(int)  # elements that take the same routes
        for part in (part for step, _ in steps for part in step.parts()):
            turns[id(part.turn)] = part.turn
            sizes[id(part.turn)] += part.size
        for key, turn in turns.items():
            for sender, to in (hop for path in turn.paths for hop in path.hops()):
                link = int(sender // node != to // node)
                self.links[link][0][sender] += 2 * sizes[key]
                self.links[link][1][to] += 2 * sizes[key]
                self.into_node[to // node] += 2 * sizes[key] * link

    @property
    def out(self) -> list[int]:
        """Bytes sent by each rank."""
        return [sum(pair) for pair in zip(self.links[0][0], self.links[1][0], strict=True)]

    @property
    def into(self) -> list[int]:
        """Bytes received by each rank."""
        return [sum(pair) for pair in zip(self.links[0][1], self.links[1][1], strict=True)]

    def busiest(self, link: int) -> int:
        """Return the maximum bytes of a rank over one kind of link, in its larger direction."""
        return max(max(direction) for direction in self.links[link])


def _messages(
    shape: ModelShape, source: ActorLayout, destination: EngineLayout, node: int
) -> tuple[int, int]:
    """Return rank 0's messages and peers in a push, by round."""
    plan = plan_for_rank(
        shape, source, destination, rank=0, wire_elements=BUCKET // 2, ranks_per_node=node
    )
    messages = peers = 0
    for part in plan.rounds:
        to = [rank for message in (*part.sends, *part.receives) for rank in message.to]
        of = [message.sender for message in part.receives]
        messages += len(to) + len(of)
        peers += len(set(to)) + len(set(of))
    return messages, peers


if __name__ == "__main__":
    main()
