"""The named objectives, each a frozen choice on the axes, with its source."""

from megatron_rl.objectives.spec import HardGate, ObjectiveSpec, PpoClip

NAMED: dict[str, ObjectiveSpec] = {
    "pnpo": ObjectiveSpec(
        weight="prefix_mean",
        constraint=HardGate(low=7e-4, high=9.5e-4, scale="sqrt(L/t)"),
        score="token",
        aggregation="response_mean",
        source="Prefix-Normalized Policy Optimization, equations 3 (weight), 8 (gate), 10",
    ),
    "gspo": ObjectiveSpec(
        weight="sequence_mean",
        constraint=PpoClip(low=3e-4, high=4e-4),
        score="path",
        aggregation="response_mean",
        source="arXiv 2507.18071",
    ),
    "grpo": ObjectiveSpec(
        weight="token",
        constraint=PpoClip(low=0.2, high=0.28, dual=10.0),
        score="path",
        aggregation="token_mean",
        source="arXiv 2402.03300, with the bounds and dual clip of the PNPO paper's baseline",
    ),
}
