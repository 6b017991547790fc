"""Dry run of one rank, without its device, its peers or its weights.

The real actor is built and run on a fake device, which counts allocations, messages and FLOPs
without computing anything. Packs are as full, and responses as long, as the config allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.dry_run import Stage, group_names, on_step
from megatron_rl.actor.reference import References
from megatron_rl.apps.planning.fake_device import CPU, CUDA, Meter, PhaseCount, fake_device
from megatron_rl.config import Config
from megatron_rl.data.packing import padded_length, plan_minibatches
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.objectives.values import GaeSettings
from megatron_rl.trainer.actor_settings import build_actor_settings, build_critic, make_groups
from megatron_rl.types import (
    GradeResult,
    Minibatch,
    Prompt,
    Response,
    Rollout,
    SamplingMask,
    TokenBatch,
)

DEVICES = {"cuda": CUDA, "cpu": CPU}
GIB, MIB, TERA = 2**30, 2**20, 10**12
DESCRIBED = ("behavior", "reference", "critic", "update")
LINES = 8  # maximum number of source lines shown per table
CATEGORIES = ("weights", "gradients", "optimizer", "activations")
NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data", "ep": "expert"}


@dataclass(frozen=True)
class DryRun:
    """Memory, messages and FLOPs of one rank of a run."""

    rank: int
    processes: int
    place: Mapping[str, tuple[int, int]]  # rank and size in each parallelism
    parameters: int  # of this rank
    sequences: tuple[int, ...]  # padded lengths of the pack
    local_tokens: int  # tokens of a pack on this rank
    micro_batches: int  # micro-batches that were run
    micro_batches_of_update: int  # if every response had the maximum length
    communicators: int  # process groups of more than one rank that sent anything
    # behavior, reference of another shape, critic, update; an update is forward, backward and step
    phases: Mapping[str, PhaseCount]
    states: Mapping[str, int]  # bytes of weights, gradients, optimizer on the device, awake
    asleep: Mapping[str, int]  # the same while the engine generates
    asleep_host: int  # pinned bytes on the host: what sleep offloads, and a reference policy

    @property
    def peak(self) -> int:
        """Maximum bytes on the device over all phases."""
        return max(phase.peak for phase in self.phases.values())


def stage_ranks(config: Config, processes: int) -> list[int]:
    """Return the first rank of the first, the middle, the largest and the last pipeline stage."""
    stages, layers = config.parallel.pipeline, config.parallel.stage_layers or []
    of_stage = [sum(layers[stage::stages]) for stage in range(stages)]
    chosen = {0, stages // 2, stages - 1, of_stage.index(max(of_stage))}
    return sorted(stage * (processes // stages) for stage in chosen)


def dry_run_rank(
    config: Config,
    *,
    processes: int,
    rank: int = 0,
    device: str = "cuda",
    micro_batches: int | None = None,
    updates: int = 1,
) -> DryRun:
    """Build the actor of one rank, compute behavior log-probs, update, and sleep.

    `model.path` needs only a config.json. device: cuda (includes the allocations of fused CUDA
    kernels) or cpu. micro_batches: by default enough to reach peak memory. Uses Megatron's local
    layers instead of Transformer Engine's. Raises ValueError for a layout that the actor rejects.
    """
    config = _with_local_layers(config)
    with fake_device(DEVICES[device]) as (mode, meter):
        stage = Stage(
            mode.device,
            count_flops=meter.add_flops,
            note_stall=meter.note_stall,
            selected=meter.selected,
            expert_share=config.run.largest_expert_share,
        )
        with stage.rank(
            rank, processes, initialise=partial(make_groups, config), as_default=mode.as_default
        ) as topology:
            return measure(config, topology, meter, micro_batches=micro_batches, updates=updates)


def _with_local_layers(config: Config) -> Config:
    model = config.model.model_copy(update={"transformer_engine": False, "fp8": None})
    return config.model_copy(update={"model": model})


def measure(
    config: Config,
    topology: Topology,
    meter: Meter,
    *,
    micro_batches: int | None = None,
    updates: int = 1,
) -> DryRun:
    """Measure an actor on this topology, fake or real."""
    meter.group_names = group_names()
    objective = build_objective(config.objective.name, **config.objective.overrides)
    nothing = torch.empty(0)  # meta tensors have no values to fit
    objective = objective.resolve(MinibatchTokens.whole(nothing, nothing, nothing))
    actor = _build(config, topology, meter)
    states, references = dict(meter.live_bytes), None
    if needs_reference(objective.needs):
        meter.category = "reference"
        references = References(actor, config.references)
    responses = full_pack(config, topology)
    needed = -(-_responses_per_rank(config, topology) // len(responses))
    if micro_batches is None:
        in_flight = topology.pp_size * (2 if topology.virtual_stages > 1 else 1)
        micro_batches = padded_length(min(in_flight, needed), alignment=topology.round_size)
    minibatch = _minibatch(config, actor, responses, micro_batches)
    packs = minibatch.micro_batches
    local = sum(packs[0].lengths) // topology.cp_size
    meter.category = "activations"
    meter.begin("behavior")
    scored = actor.compute_logprobs(packs, routing="record")
    for pack, logprobs in zip(packs, scored, strict=True):
        pack.behavior_logprobs = logprobs
        if "reference_logprobs" in objective.needs:
            pack.reference_logprobs = torch.zeros_like(logprobs)
    if references is not None:
        _score_references(references, packs, objective, meter)
    if config.critic is not None:
        _train_critic(config, actor, minibatch, meter)
    for update in range(updates):
        _update(actor, minibatch, objective, meter, number=f" {update + 1}" if update else "")
    phases = {name: count for name, count in meter.phases.items() if name != "start"}
    meter.begin("asleep")
    actor.sleep()
    groups = {(each.group, each.ranks) for phase in phases.values() for each in phase.collectives}
    sizes = ("tp", "pp", "cp", "dp", "ep")
    return DryRun(
        rank=topology.rank,
        processes=topology.world_size,
        place={s: (getattr(topology, f"{s}_rank"), getattr(topology, f"{s}_size")) for s in sizes},
        parameters=sum(p.numel() for p in actor.tensors().values()),
        sequences=packs[0].sequence_lengths,
        local_tokens=local,
        micro_batches=len(packs),
        micro_batches_of_update=needed,
        communicators=sum(ranks > 1 for _, ranks in groups),
        phases=phases,
        states=states,
        asleep=dict(meter.live_bytes),
        asleep_host=meter.live_bytes_on_host,
    )


def _score_references(
    references: References, packs: Sequence[TokenBatch], objective: Any, meter: Meter
) -> None:
    """Run the references over the packs, in turn; those of another shape as a phase of its own.

    Several have the responses of each pack one after the other.
    """
    names = [own[0] for own in references.sources]
    sources = [[names[n % len(names)] for n in range(len(pack.lengths))] for pack in packs]
    is_other = any(policy.other is not None for policy in references.policies)
    if is_other:
        meter.begin("reference")
    if objective.divergence is not None:
        heads = references.compute_head_inputs(packs, sources, top_k=objective.top_k)
        for pack, head in zip(packs, heads or (), strict=heads is not None):
            pack.reference_head = head
    elif is_other:
        references.compute_logprobs(packs, sources)


def _train_critic(config: Config, actor: MegatronActor, minibatch: Minibatch, meter: Meter) -> None:
    """Compute values and make one update of the critic, which sleeps afterwards like the actor."""
    meter.begin("start")  # reading weights is no part of a step
    meter.category = "critic"
    critic = build_critic(config, actor)
    meter.begin("critic")
    assert critic is not None and config.critic is not None, "the config has one"
    critic.wake_up()
    meter.category = "activations"
    packs = minibatch.micro_batches
    rewards = [torch.zeros(len(pack.tokens)) for pack in packs]
    ends = [pack.response_mask for pack in packs]
    cut = [torch.zeros(len(pack.lengths), dtype=torch.bool) for pack in packs]
    settings = GaeSettings.of(config.critic)
    targets = critic.compute_targets(packs, rewards, ends, cut, settings=settings)
    for pack, one in zip(packs, targets, strict=True):
        pack.values, _, pack.returns = one.unbind(1)
    critic.update(minibatch, clip=config.critic.value_clip)
    critic.sleep()


def _update(
    actor: MegatronActor, minibatch: Minibatch, objective: Any, meter: Meter, *, number: str
) -> None:
    """Run one update, its optimizer step as a phase of its own."""
    meter.begin(f"update{number}")
    meter.category = "optimizer"
    actor.wake_up()  # it slept while a critic was trained
    meter.category = "activations"
    with on_step(partial(meter.begin, f"step{number}")):
        actor.update(minibatch, objective)


def _build(config: Config, topology: Topology, meter: Meter) -> MegatronActor:
    """Build the actor, its memory labeled as weights, gradients and optimizer."""
    settings = build_actor_settings(config, topology)
    meter.category = "optimizer"
    actor = MegatronActor(config.model.path, topology=topology, settings=settings)
    for chunk in actor.ddp_chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            meter.relabel(buffer.grad_data, "gradients")
            if buffer.param_data is not None:
                meter.relabel(buffer.param_data, "weights")
    for parameter in actor.tensors().values():
        meter.relabel(parameter, "weights")
    return actor


def full_pack(config: Config, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the unpadded sequence lengths of each response of the fullest pack.

    These are as many responses as fit, at least one, with the maximum number of sequences of the
    maximum length, and one of a single sequence in the rest.
    """
    alignment = topology.alignment
    longest = config.max_model_tokens - 1  # the last token predicts nothing
    response = (longest,) * config.max_sequences
    padded = padded_length(longest, alignment=alignment) * len(response)
    budget = config.trainer.tokens_per_micro_batch // alignment * alignment
    whole = max(1, budget // padded)
    limit = _responses_per_rank(config, topology)
    if whole >= limit:
        return (response,) * limit
    rest = min(budget - whole * padded, longest)
    return (response,) * whole + (((rest,),) if rest >= max(alignment, 2) else ())


def _responses_per_rank(config: Config, topology: Topology) -> int:
    """Return the number of responses per rank in one minibatch."""
    rollout = config.rollout
    responses = (
        rollout.prompts_per_step * rollout.responses_per_prompt // config.trainer.minibatches
    )
    return max(1, -(-responses // topology.dp_size))


def _minibatch(
    config: Config, actor: MegatronActor, responses: Sequence[Sequence[int]], micro_batches: int
) -> Minibatch:
    """Build this rank's identical packs with the trainer's own minibatch planning."""
    every = list(responses) * (micro_batches * actor.topology.dp_size)
    rollouts = [
        _rollout(tokens, config.data.max_prompt_tokens, group)
        for group, own in enumerate(batched(every, config.rollout.responses_per_prompt))
        for tokens in own
    ]
    (minibatch,) = plan_minibatches(
        rollouts,
        torch.ones(len(rollouts)),
        minibatches=1,
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        topology=actor.topology,
        gemm_tokens=actor.settings.gemm_tokens,
        sharing=actor.sharing,
    )
    if config.rollout.top_k is not None:
        for pack in minibatch.micro_batches:
            counts = torch.full_like(pack.tokens, config.rollout.top_k, dtype=torch.int32)
            ids = torch.zeros(int(counts.sum()), dtype=torch.int32)
            pack.sampling_mask = SamplingMask(ids, counts)
    return minibatch


def batched(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield `size` values at a time."""
    yield from (values[start : start + size] for start in range(0, len(values), size))


def _rollout(tokens: Sequence[int], max_prompt_tokens: int, group: int) -> Rollout:
    """Build a response whose sequences have `tokens` positions that predict a next token.

    Groups differ in the first token of their prompt, so that only rollouts of one share it.
    """
    prompt_tokens = min(max_prompt_tokens, max(1, tokens[0] // 2))
    prompt = Prompt(0, (), (group % 64, *(1,) * (prompt_tokens - 1)), "", "")
    *restarts, length = itertools.accumulate(tokens[1:], lambda end, size: end + size + 1,
                                             initial=tokens[0] - prompt_tokens + 1)  # fmt: skip
    observed = tuple((place, place + prompt_tokens) for place in restarts)
    sampled = length - prompt_tokens * len(restarts)
    response = Response(
        0, 0, np.ones(length, np.int32), np.zeros(sampled, np.float32), "", "stop", 0,
        observed=observed, restarts=tuple(restarts),
    )  # fmt: skip
    return Rollout(prompt, response, GradeResult(0.0, "", None))


def describe(dry_run: DryRun) -> str:
    """Describe memory by phase, peak allocations by line, collectives, FLOPs and host stalls."""
    place = ", ".join(f"{NAMES[k]} {rank}/{size}" for k, (rank, size) in dry_run.place.items())
    of_update = dry_run.micro_batches_of_update
    lines = [
        f"rank {dry_run.rank} of {dry_run.processes} ({place}): {dry_run.parameters:,} parameters",
        f"packs of {len(dry_run.sequences)} sequences, {sum(dry_run.sequences):,} tokens, "
        f"{dry_run.local_tokens:,} on this rank; {dry_run.micro_batches} packs were run, "
        f"an update has {of_update} if every response has the maximum length",
        "",
        f"  {'GiB on the device':<20}" + "".join(f"{name:>13}" for name in (*CATEGORIES, "total")),
        _memory_line("built", dry_run.states),
        *(_memory_line(f"{k}, peak", p.by_category) for k, p in dry_run.phases.items()),
        _memory_line("asleep", dry_run.asleep)
        + f"   and {dry_run.asleep_host / GIB:.2f} on the host",
    ]
    for name, phase in dry_run.phases.items():
        if name not in DESCRIBED:  # the second update differs only in its memory
            continue
        lines += ["", f"{name}: {phase.flops / TERA:,.1f} TFLOP in matrix products and attention"]
        lines += _phase_lines(phase)
    return "\n".join(lines)


def _memory_line(name: str, by_category: Any) -> str:
    sizes = [by_category.get(category, 0) for category in CATEGORIES]
    sizes.append(sum(by_category.values()))
    return f"  {name:<20}" + "".join(f"{size / GIB:>13.2f}" for size in sizes)


def _phase_lines(phase: PhaseCount) -> list[str]:
    largest = sorted(phase.by_line.items(), key=lambda item: -item[1])
    shown = [(line, size) for (kind, line), size in largest if kind == "activations" and size]
    lines = ["  activations at the peak, by source line"] if shown else []
    lines += [f"    {size / GIB:8.2f} GiB  {line}" for line, size in shown[:LINES]]
    if len(shown) > LINES:
        rest = sum(size for _, size in shown[LINES:])
        lines.append(f"    {rest / GIB:8.2f} GiB  {len(shown) - LINES} other lines")
    if phase.messages:
        lines.append("  collectives                              group   ranks   calls         MiB")
    lines += [
        f"    {c.operation:<36} {c.group:<10} {c.ranks:>4} {c.count:>7} {c.bytes / MIB:>11,.1f}"
        for c in phase.collectives
    ]
    if phase.stalls:
        lines.append(f"  the host waits for the device {phase.stalls.total()} times")
        lines += [f"    {count:>6} x {line}" for line, count in phase.stalls.most_common(LINES)]
    return lines


def as_values(dry_run: DryRun) -> dict[str, Any]:
    """Convert all fields to JSON values; memory is in bytes."""
    values = {
        key: dict(value) if key in ("place", "states", "asleep") else value
        for key, value in vars(dry_run).items()
        if key != "phases"
    }
    values["phases"] = {
        name: {
            "peak": phase.peak,
            "by_category": phase.by_category,
            "by_line": {
                f"{category} {line}": size
                for (category, line), size in phase.by_line.items()
                if size
            },
            "flops": phase.flops,
            "collectives": [vars(each) for each in phase.collectives],
            "stalls": dict(phase.stalls),
        }
        for name, phase in dry_run.phases.items()
    }
    return values
