"""Objectives of each kind under tp 2 x cp 2: the loss and the update of one process.

And the terms that need the actor's help: KL to a reference policy, and entropy. All objectives are
in `tests/unit/objectives/test_invariance.py`. Pipeline stages take no part in an objective: some
cases show that under pp 2 x cp 2.
"""

import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import EXPERTS, SIZES
from tests.functional.test_actor_layouts import make_model, make_rollouts, plan, randomise
from tests.published_form import load_model
from tests.ranks import run_ranks

# Ratios of a prefix, of a sequence and of a token; a rule over the whole minibatch.
PLAIN = ("pnpo", "gspo", "grpo", "m2po")
CASES = {name: (name, {}) for name in PLAIN} | {
    f"{name} with {kind} and entropy": (
        name,
        {"kl": {"coefficient": 0.3, "estimator": kind}, "entropy_coefficient": 0.2},
    )
    for name, kind in (("pnpo", "k3"), ("grpo", "k2"))
}
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
ALONE = [f"distillation, {kind}" for kind in (*DIVERGENCES, "likeliest tokens")]
DISTILLED = {"advantage_coefficient": 0.0}
for divergence in DIVERGENCES:
    term = {"kl": {"coefficient": 1.0, "estimator": divergence}}
    CASES[f"distillation, {divergence}"] = ("grpo", {**DISTILLED, **term})
CASES["other shape, jsd"] = CASES["distillation, jsd"]
CASES["two teachers, reverse_kl"] = CASES["distillation, reverse_kl"]
few = {"kl": {"coefficient": 1.0, "estimator": "forward_kl", "top_k": 5}}
CASES["distillation, likeliest tokens"] = ("grpo", {**DISTILLED, **few})
CASES["two teachers, likeliest tokens"] = CASES["distillation, likeliest tokens"]
wide = {"low": 0.05, "high": 0.07}  # some weights leave the bounds
weighted = {"kl": {"coefficient": 1.0, "estimator": "jsd", "weighted": True}, "constraint": wide}
CASES["distillation and rewards"] = ("pnpo", {**weighted, "entropy_coefficient": 0.2})
advantage = {"kl": {"coefficient": 1.0, "estimator": "advantage"}, "constraint": wide}
CASES["two teachers, advantage"] = ("pnpo", {**DISTILLED, **advantage})
CASES["m2po, rejecting"] = ("m2po", {"constraint": {"threshold": 1e-3}})
PIPELINED = [
    "pnpo with k3 and entropy", "distillation and rewards", "other shape, jsd", "m2po, rejecting",
    "two teachers, likeliest tokens", "two teachers, advantage",
]  # fmt: skip
LAYOUTS = {"one": ((1, 1, 1), list(CASES)), "tp2-cp2": ((2, 1, 2), list(CASES)),
           "pp2-cp2": ((1, 2, 2), PIPELINED), "shared": ((1, 1, 1), list(CASES)),
           "shared, tp2-cp2": ((2, 1, 2), list(CASES))}  # fmt: skip
SLOW = ("shared, tp2-cp2",)  # the parts of two other cases together
MOVED_ALIKE = 1e-2  # of the largest step of any weight
SOURCES = "ab"  # of the responses in turn, where two teachers are given
TEACHERS = {  # other families than the student's Qwen2, with other depths and widths
    "teacher": ("LlamaConfig", {"hidden_size": 48, "num_hidden_layers": 3}),
    "experts": ("Qwen3MoeConfig", {"num_hidden_layers": 3, **EXPERTS, "norm_topk_prob": True}),
}
DRIFT = 0.05  # of each token's log-prob from the behavior policy: some weights leave their bounds


def _drifted(pack, logprobs, noise):
    """Behavior log-probs as of a policy that has moved: the actor's, shifted token by token."""
    shifted = logprobs.clone()
    start = 0
    for index, length in zip(pack.rollout_indices, pack.lengths, strict=True):
        rows = pack.response_mask[start : start + length]
        part = shifted[start : start + length]
        part[rows] -= noise[index, : int(rows.sum())]
        start += length
    return shifted.clamp(max=0)


def _sources(packs):
    """Data sources of each pack's responses; that of a filler's is none."""
    return [[None if n < 0 else SOURCES[n % 2] for n in pack.rollout_indices] for pack in packs]


def _distill_from_itself(actor, minibatch, objective):
    """Loss and gradient norm, without an update, of a teacher that is the student."""
    from dataclasses import replace

    heads = actor.compute_head_inputs(minibatch.micro_batches, routing="own", top_k=objective.top_k)
    packs = [replace(pack) for pack in minibatch.micro_batches]
    for pack, head in zip(packs, heads or (), strict=heads is not None):
        pack.reference_head = head
    result = actor.update(replace(minibatch, micro_batches=packs), objective, rule=lambda _: "no")
    assert result.stopped == "no"
    return result.statistics.to_metrics().get("loss/kl", 0.0), result.grad_norm


def build_actor(root, layout, *, is_shared=False):
    """The actor of one layout and its minibatch, with log-probs of other policies.

    is_shared: what responses have in common is computed once.
    """
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.sharing import Sharing

    tensor, pipeline, context = layout
    topology = groups.initialise(tensor=tensor, pipeline=pipeline, context=context)
    settings = ActorSettings(
        optimizer=OptimizerSection(
            learning_rate=3e-3, epsilon=1e-3, weight_decay=0.0, max_grad_norm=0.0
        ),
        warmup_updates=0,
    )
    actor = MegatronActor(root / "model", topology=topology, settings=settings)
    sharing = Sharing(1.0, always=True) if is_shared else None
    (minibatch,) = plan(actor, *make_rollouts(), minibatches=1, tokens=240, sharing=sharing)
    packs = minibatch.micro_batches
    assert is_shared == any(pack.parents for pack in packs)
    generator = torch.Generator().manual_seed(2)
    noise, engine_noise = DRIFT * torch.randn(2, 16, 64, generator=generator)
    for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
        pack.behavior_logprobs = _drifted(pack, logprobs, noise)
        pack.rollout_logprobs = _drifted(pack, pack.behavior_logprobs, engine_noise)
    return actor, minibatch


def _restart(actor, weights):
    """Bring back the weights of the model's folder, and an optimizer that has made no step."""
    from megatron_rl.actor.memory import optimizer_parts

    with torch.no_grad():
        for name, parameter in actor.named_parameters_local().items():
            parameter.copy_(weights[name])
    for part in optimizer_parts(actor.optimizer):
        for state in part.optimizer.state.values():
            for value in state.values():
                value.zero_()
    actor.updates, actor.is_initial = 0, True


def run_objectives(rank, world_size, root, name, layout, cases):
    """One update by every objective, each from the same weights; runs on every rank."""
    from dataclasses import replace

    from megatron_rl.actor.reference import References
    from megatron_rl.objectives import build_objective

    actor, planned = build_actor(root, layout, is_shared=name.startswith("shared"))
    weights = {n: p.detach().clone() for n, p in actor.named_parameters_local().items()}
    losses = {}
    for case in cases:
        objective_name, overrides = CASES[case]
        objective = build_objective(objective_name, **overrides)
        folders = {None: root / ("teacher" if case.startswith("other shape") else "reference")}
        if case.startswith("two teachers"):
            folders = {"a": root / "reference", "b": root / "experts"}
        packs = [replace(pack) for pack in planned.micro_batches]
        minibatch, sources = replace(planned, micro_batches=packs), _sources(packs)
        if case in ALONE:
            losses[f"{case}, from itself"] = _distill_from_itself(actor, minibatch, objective)
        if objective.divergence is not None:
            references = References(actor, folders)
            heads = references.compute_head_inputs(packs, sources, top_k=objective.top_k)
            for pack, head in zip(packs, heads or (), strict=heads is not None):
                pack.reference_head = head
        if "reference_logprobs" in objective.needs:
            scored = References(actor, folders).compute_logprobs(packs, sources)
            for pack, logprobs in zip(packs, scored, strict=True):
                pack.reference_logprobs = logprobs
        result = actor.update(minibatch, objective)
        metrics = result.statistics.to_metrics()
        terms = [metrics[key] for key in sorted(metrics) if key.startswith("loss/")]
        losses[case] = (*terms, result.grad_norm)
        actor.export_hf(root / name / case)
        _restart(actor, weights)
    return json.dumps(losses)


def make_teacher(folder, kind, changes, *, seed):
    """A random model of another family, with the student's tokens."""
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """The models' folder, and a function that returns the losses of a layout."""
    root = tmp_path_factory.mktemp("objectives")
    make_model(root / "model", tied=True, layers=2)
    make_model(root / "reference", tied=True, seed=4, layers=2)
    for number, (name, (kind, changes)) in enumerate(TEACHERS.items()):
        make_teacher(root / name, kind, changes, seed=5 + number)

    @functools.cache
    def losses(name):
        sizes, cases = LAYOUTS[name]
        return json.loads(run_ranks(run_objectives, math.prod(sizes), root, name, sizes, cases)[0])

    return root, losses


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(name, case, marks=[pytest.mark.slow] * (name in SLOW))
        for name in list(LAYOUTS)[1:]
        for case in LAYOUTS[name][1]
    ],
)
def test_update_is_independent_of_layout_and_sharing(updated, layout, case):
    root, losses = updated
    assert losses(layout)[case] == pytest.approx(losses("one")[case], rel=1e-5, abs=1e-7)
    before = load_file(root / "model" / "model.safetensors")
    alone, together = (_weights(root / name / case) for name in ("one", layout))
    moved = max((weight - before[key]).abs().max().item() for key, weight in alone.items())
    assert moved > 1e-4  # hundreds of float32 roundings of a weight: an update to compare
    for key, weight in alone.items():
        torch.testing.assert_close(together[key], weight, atol=MOVED_ALIKE * moved, rtol=0)


def _weights(folder: Path):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_optional_terms_are_recorded(updated):
    one = updated[1]("one")
    for name in ("pnpo", "grpo"):
        plain = one[name]  # policy loss, gradient norm
        entropy, kl, policy, norm = next(one[case] for case in one if case.startswith(f"{name} w"))
        assert policy == pytest.approx(plain[0], rel=1e-6)  # next to the policy term, not in it
        # The reference is another random model, far away; 61 words have at most log 61 nats.
        assert kl > 0.1
        assert -0.2 * math.log(61) < entropy < -0.2 * 0.5
        assert norm > 1.1 * plain[1]


def test_teacher_that_is_the_student_gives_no_gradient(updated):
    for layout in ("one", "tp2-cp2"):
        losses = updated[1](layout)
        assert all(losses[f"{case}, from itself"] == [0.0, 0.0] for case in ALONE)


def test_distillation_equals_transformers(updated):
    """Loss and gradient norm of both models' whole vocabulary, at the temperature of 1.

    Of two teachers each response has its own, and the sum over both is divided by all tokens.
    """
    root, one = updated[0], updated[1]("one")
    student = load_model(root / "model")
    teachers = {
        "distillation": [load_model(root / "reference")],
        "other shape": [load_model(root / "teacher")],
        "two teachers": [load_model(root / name) for name in ("reference", "experts")],
    }
    rollouts, _ = make_rollouts()
    for kind, divergence in itertools.product(teachers, DIVERGENCES):
        if f"{kind}, {divergence}" not in one:
            continue
        student.zero_grad()
        total, count = 0.0, 0
        for rollout, teacher in zip(rollouts, itertools.cycle(teachers[kind])):
            prompt, response = rollout.prompt.token_ids, rollout.response.token_ids
            ids = torch.tensor([[*prompt, *response]])
            rows = slice(len(prompt) - 1, -1)
            log_p = student(input_ids=ids).logits[0, rows].log_softmax(-1)
            with torch.no_grad():
                log_q = teacher(input_ids=ids).logits[0, rows].log_softmax(-1)
            total = total + _divergence(divergence, log_p, log_q)
            count += len(response)
        (total / count).backward()
        squares = [p.grad.double().square().sum() for p in student.parameters()]
        kl, *_, norm = one[f"{kind}, {divergence}"]  # between them a policy term of 0
        assert kl == pytest.approx(total.item() / count, rel=1e-5)
        assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


def _divergence(name, log_p, log_q):
    p, q = log_p.exp(), log_q.exp()
    if name == "reverse_kl":
        return (p * (log_p - log_q)).sum()
    if name == "forward_kl":
        return (q * (log_q - log_p)).sum()
    log_m = ((p + q) / 2).log()
    return ((p * (log_p - log_m)).sum() + (q * (log_q - log_m)).sum()) / 2
