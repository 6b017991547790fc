"""One policy under every layout: the same log-probs, losses, gradients, updates and files.

One launch per layout does everything (starting torch and Megatron in each rank is what costs).
The single process is the reference; it is compared with transformers.
"""

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.functional.critic_checks import check_critic, run_adapted_critic, run_critic
from tests.published_form import load_model
from tests.ranks import run_ranks

VOCAB, LAYERS = 61, 4  # a vocabulary that no layout divides without padding
LAYOUTS = [(2, 2, 1, 1), (1, 1, 2, 2)]
SLOW = [(2, 1, 1, 1), (1, 1, 2, 1), (2, 2, 2, 1)]
TRACED = [1, 6]  # rollouts of the first minibatch
# Gates as wide as the steps are large, so that some tokens are kept and some rejected.
WIDE = {"constraint": {"low": 0.2, "high": 0.3}}
OBJECTIVES = {"pnpo": "tied", "gspo": "untied"}  # and the model each trains


def make_model(
    folder: Path, *, tied: bool, seed: int = 3, hidden: int = 32, layers: int = LAYERS
) -> None:
    """A random Qwen2 whose biases and norms matter."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_theta=1000.0,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    randomise(model)
    model.save_pretrained(folder)


def randomise(model):
    """Weights and biases that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states of gated delta nets last for dozens of tokens
                parameter.normal_(-3, 1)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)


def make_rollouts():
    """Four groups of four, responses from 1 to 40 tokens."""
    from megatron_rl.types import GradeResult, Prompt, Response, Rollout

    generator = torch.Generator().manual_seed(5)

    def draw(length):
        return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())

    rollouts = []
    for index in range(4):
        prompt = Prompt(index, (), draw(3 + 2 * index), "", "")
        for sample in range(4):
            length = (
                1 if index == sample == 0 else int(torch.randint(2, 41, (), generator=generator))
            )
            response = Response(index, sample, draw(length), (0.0,) * length, "", "stop", 0)
            rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
    return rollouts, torch.randn(16, generator=generator)


def make_split_rollouts():
    """Two of the groups; the history of each longer response is replaced once or twice."""
    rollouts, _ = make_rollouts()
    changed = []
    for rollout in rollouts[:8]:
        tokens = rollout.response.token_ids
        places = [place for place in (2, 9) if len(tokens) > place + 4]
        observed = tuple((place, place + 4) for place in places)
        response = replace(
            rollout.response, token_ids=np.array(tokens), observed=observed,
            restarts=tuple(places), rollout_logprobs=(0.0,) * (len(tokens) - 4 * len(places)),
        )  # fmt: skip
        changed.append(replace(rollout, response=response))
    assert {len(one.response.restarts) for one in changed} == {0, 1, 2}
    return changed


def _score_split(actor):
    """Log-probs of responses with replaced histories."""
    from megatron_rl.data.packing import gather_by_rollout

    rollouts = make_split_rollouts()
    minibatches = plan(actor, rollouts, torch.ones(len(rollouts)), minibatches=1)
    packs = freeze_behavior(actor, minibatches)
    values = [pack.behavior_logprobs for pack in packs]
    rows = gather_by_rollout(packs, values, count=len(rollouts), topology=actor.topology)
    return [row.tolist() for row in rows]


def _settings():
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection

    # A large epsilon: where a gradient is zero but for rounding (key biases), Adam would otherwise
    # turn the rounding into full steps.
    return ActorSettings(
        optimizer=OptimizerSection(
            learning_rate=3e-3, epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5
        ),
        warmup_updates=2,
        overlap_reduction=torch.distributed.get_world_size() > 1,
    )


def lengthen_prompts(rollouts, advantages):
    """All prompts begin alike, with 17 tokens, and then with 17 of their own."""
    generator = torch.Generator().manual_seed(11)
    same = tuple(torch.randint(0, VOCAB, (17,), generator=generator).tolist())
    changed = [
        replace(one, prompt=replace(one.prompt, token_ids=same + one.prompt.token_ids + same[::-1]))
        for one in rollouts
    ]
    return changed, advantages


def plan(actor, rollouts, advantages, *, minibatches, computed=None, tokens=160, sharing=None):
    """Minibatches of small packs in the actor's layout: of the rollouts above 3, or 2 of 240."""
    from megatron_rl.data.packing import plan_minibatches

    return plan_minibatches(
        rollouts,
        advantages,
        minibatches=minibatches,
        tokens_per_micro_batch=tokens,
        topology=actor.topology,
        computed=computed,
        sharing=sharing,
    )


def freeze_behavior(actor, minibatches):
    """Let the actor as it is be what has generated; all packs."""
    packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
    for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
        pack.behavior_logprobs = logprobs
    return packs


def _report(result):
    metrics = result.statistics.to_metrics()
    return {
        "loss": metrics["loss/policy"],
        "acceptance": metrics["gate/acceptance"],
        "deviation": metrics["ratio/max_deviation"],
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
    }


def _train(name, actor, folder, checkpoint):
    """Two updates, with a checkpoint between them; then the second again from checkpoints.

    Their reports, the log-probs that they traced, and those that were frozen before.
    """
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective
    from megatron_rl.rollouts.rollout_batch import gather_traces, mark_traced

    objective = build_objective(name, **WIDE)
    minibatches = plan(actor, *make_rollouts(), minibatches=2)
    freeze_behavior(actor, minibatches)
    packs = minibatches[0].micro_batches
    mark_traced(packs, TRACED)
    reports = [_report(actor.update(minibatches[0], objective))]
    actor.sleep()
    actor.save(folder / f"{name}-checkpoint")
    assert actor.asleep, "the engine has that memory"
    reports.append(_report(actor.update(minibatches[0], objective)))
    actor.export_hf(folder / name)
    actor.load(folder / f"{name}-checkpoint")
    reports.append(_report(actor.update(minibatches[0], objective)))
    if checkpoint is not None:  # saved under another layout
        fresh = MegatronActor(actor.model_folder, topology=actor.topology, settings=_settings())
        fresh.load(checkpoint / f"{name}-checkpoint")
        reports.append(_report(fresh.update(minibatches[0], objective)))
    traces = gather_traces(packs, TRACED, topology=actor.topology)
    frozen = gather_by_rollout(
        packs, [pack.behavior_logprobs for pack in packs], count=16, topology=actor.topology
    )
    return reports, [[traces[place].tolist(), frozen[place].tolist()] for place in TRACED]


def _train_without(actor, computed):
    """Four updates and two more; losses, gradient norms, and the weights that they led to.

    The second group has advantage 0, and so has one response of the third. The first update of
    each objective has the same weights whatever is computed; the minibatch of the second group has
    nothing to compute, and steps all the same.
    """
    from megatron_rl.objectives import build_objective

    rollouts, advantages = make_rollouts()
    advantages[4:8] = advantages[9] = 0
    minibatches = plan(actor, rollouts, advantages, minibatches=4, computed=computed)
    packs = freeze_behavior(actor, minibatches)
    for pack in packs:
        pack.rollout_logprobs = 1.01 * pack.behavior_logprobs
    reports = []
    correction = {"rollout_correction": {"high": 1.02}}
    for name, options, chosen in (
        ("pnpo", WIDE, minibatches),
        ("dapo", correction, minibatches[1:3]),
    ):
        objective = build_objective(name, **options)
        for minibatch in chosen:
            result = actor.update(minibatch, objective)
            loss = result.statistics.to_metrics()["loss/policy"]
            reports.append((loss, result.grad_norm))
    return reports, {k: v.detach().clone() for k, v in actor.named_parameters_local().items()}


def _compare_computed(root, topology):
    """The same with all responses computed and without those of advantage 0."""
    from megatron_rl.actor.actor import MegatronActor

    advantages = make_rollouts()[1]
    advantages[4:8] = advantages[9] = 0
    runs = []
    for computed in (None, (advantages != 0).tolist()):
        actor = MegatronActor(root / "tied", topology=topology, settings=_settings())
        start = {k: v.detach().clone() for k, v in actor.named_parameters_local().items()}
        runs.append(_train_without(actor, computed))
    (all_reports, everything), (few_reports, few) = runs
    differ = max((everything[key] - few[key]).abs().max().item() for key in few)
    moved = max((everything[key] - start[key]).abs().max().item() for key in few)
    return all_reports, few_reports, differ, moved


def make_demonstrations():
    """Given answers of one and several turns, some in a second sequence."""
    from megatron_rl.types import Demonstration, Prompt

    generator = torch.Generator().manual_seed(8)

    def draw(length):
        return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())

    shapes = [
        (1, (), ()), (40, (), ()), (23, ((5, 9),), ()), (31, ((3, 8), (20, 22)), ()),
        (30, ((4, 11), (15, 25)), (15,)), (27, ((9, 16),), (9,)),
    ]  # fmt: skip
    messages = ({"role": "assistant", "content": ""},)
    return [
        Prompt(n, messages, draw(3 + n), "", "", demonstration=Demonstration(draw(size), *places))
        for n, (size, *places) in enumerate(shapes)
    ]


def _train_on_demonstrations(folder, topology, model):
    """One update whose step is the gradient: Adam with an epsilon far above every gradient."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.objectives import build_objective
    from megatron_rl.rollouts.demonstration_source import as_rollout

    optimizer = OptimizerSection(
        learning_rate=1e8, epsilon=1e8, weight_decay=0.0, max_grad_norm=0.0
    )
    settings = replace(_settings(), optimizer=optimizer, warmup_updates=0)
    actor = MegatronActor(model, topology=topology, settings=settings)
    rollouts = [as_rollout(prompt) for prompt in make_demonstrations()]
    (minibatch,) = plan(actor, rollouts, torch.ones(len(rollouts)), minibatches=1)
    for pack in minibatch.micro_batches:
        pack.on_policy = True
    result = actor.update(minibatch, build_objective("sft"))
    actor.export_hf(folder / "sft")
    return _report(result)


def run_layout(rank, world_size, root, layout, checkpoint):
    """Run all checks of one layout on every rank."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.data.packing import gather_by_rollout

    tensor, pipeline, context, _ = layout
    topology = groups.initialise(tensor=tensor, pipeline=pipeline, context=context)
    root = Path(root)
    folder = root / "-".join(map(str, layout))
    report = {}
    rollouts, advantages = make_rollouts()
    for model in ("tied", "untied"):
        actor = MegatronActor(root / model, topology=topology, settings=_settings())
        minibatches = plan(actor, rollouts, advantages, minibatches=2)
        packs = freeze_behavior(actor, minibatches)
        values = [pack.behavior_logprobs for pack in packs]
        rows = gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
        report[model] = [row.tolist() for row in rows]
        actor.export_hf(folder / model)
        if model == "tied":
            report["split"] = _score_split(actor)
    report["sft"] = _train_on_demonstrations(folder, topology, root / "untied")
    report["critic"] = run_critic(root / "tied", topology, _settings(), rollouts, plan, folder)
    report["adapted critic"] = run_adapted_critic(
        root / "tied", topology, _settings(), rollouts, plan, folder
    )
    *report["computed"], differ, moved = _compare_computed(root, topology)
    assert differ < 1e-5 < 1e-3 < moved, (rank, differ, moved)
    for name, model in OBJECTIVES.items():
        actor = MegatronActor(root / model, topology=topology, settings=_settings())
        report[name], report[f"{name} traces"] = _train(
            name, actor, folder, checkpoint and Path(checkpoint)
        )
    return json.dumps(report)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    make_model(folder / "tied", tied=True, layers=2)
    make_model(folder / "untied", tied=False, layers=2)
    return folder


@pytest.fixture(scope="module")
def reference(root):
    return json.loads(run_ranks(run_layout, 1, str(root), (1, 1, 1, 1), None)[0])


@functools.cache
def transformers_logprobs(folder, dtype=torch.float32):
    model = load_model(folder, dtype)
    rows = []
    for rollout in make_rollouts()[0]:
        text = torch.tensor([[*rollout.prompt.token_ids, *rollout.response.token_ids]])
        with torch.no_grad():
            logprobs = model(text).logits[0, :-1].float().log_softmax(-1)
        picked = logprobs.gather(1, text[0, 1:, None]).squeeze(1)
        rows.append(picked[-len(rollout.response.token_ids) :].tolist())
    return rows


def split_logprobs(folder):
    """Log-probs of transformers, for each sequence of a response alone."""
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for rollout in make_split_rollouts():
        response, row = rollout.response, []
        text = [*rollout.prompt.token_ids, *response.token_ids]
        own = [*(False for _ in rollout.prompt.token_ids), *response.own]
        bounds = [0, *(len(text) - len(response.token_ids) + r for r in response.restarts)]
        for first, end in zip(bounds, [*bounds[1:], len(text)], strict=True):
            tokens = torch.tensor([text[first:end]])
            with torch.no_grad():
                logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
            picked = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
            row += picked[torch.tensor(own[first + 1 : end])].tolist()
        rows.append(row)
    return rows


def demonstration_gradient(folder):
    """Loss and gradient by transformers: the mean over all trained tokens, sequence by sequence."""
    model = load_model(folder, torch.float64)
    losses = []
    for prompt in make_demonstrations():
        given, start = prompt.demonstration, len(prompt.token_ids)
        text = [*prompt.token_ids, *given.token_ids]
        own = [n >= start for n in range(len(text))]
        for first, end in given.observed:
            own[start + first : start + end] = [False] * (end - first)
        bounds = [0, *(start + one for one in given.restarts), len(text)]
        for first, end in itertools.pairwise(bounds):
            labels = [token if own[first + n] else -100 for n, token in enumerate(text[first:end])]
            logits = model(torch.tensor([text[first:end]])).logits[0, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits, torch.tensor(labels[1:]), reduction="none", ignore_index=-100
                )
            )
    tokens = sum(len(one.demonstration.token_ids) for one in make_demonstrations())
    observed = sum(
        end - first for one in make_demonstrations() for first, end in one.demonstration.observed
    )
    loss = torch.cat(losses).sum() / (tokens - observed)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def _check_demonstrations(report, root, layout):
    loss, gradient = demonstration_gradient(root / "untied")
    assert report["loss"] == pytest.approx(loss, rel=1e-6)
    assert report["deviation"] == 0.0  # ratios are 1: there is no behavior policy
    after = load_file(root / "-".join(map(str, layout)) / "sft" / "model.safetensors")
    before = load_file(root / "untied" / "model.safetensors")
    largest = max(grad.abs().max().item() for grad in gradient.values())
    for name, grad in gradient.items():
        step = (before[name].double() - after[name].double()) - grad
        assert step.abs().max().item() < 1e-5 * largest, name


def _close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_log_probs_and_gradient_are_those_of_transformers(root, reference):
    for model in ("tied", "untied"):
        _close(reference[model], transformers_logprobs(root / model))
    _close(reference["split"], split_logprobs(root / "tied"))
    _check_demonstrations(reference["sft"], root, (1, 1, 1, 1))
    check_critic(reference["critic"], root / "tied", make_rollouts()[0])


def test_updates_of_one_process(root, reference):
    for name in OBJECTIVES:
        first, second, repeated = reference[name]
        assert first["deviation"] == 0.0
        assert first["acceptance"] == 1.0
        assert second["deviation"] > 1e-2  # the policy moved
        assert repeated == second  # bit for bit from the checkpoint
        assert first["learning_rate"] == 1.5e-3  # half-way through a warm-up of two
        assert first["grad_norm"] > 1e-2
        assert 0.1 < second["acceptance"] < 0.999
        assert second["grad_norm"] > 1e-2
    _check_traces(reference, reference)
    _check_computed(reference)
    _check_files(root, (1, 1, 1, 1))


def _check_traces(report, reference):
    """Traced log-probs of an update; in the first one they equal the behavior log-probs."""
    for name in OBJECTIVES:
        assert len(report[f"{name} traces"]) == len(TRACED)
        for (rows, frozen), (want, _) in zip(
            report[f"{name} traces"], reference[f"{name} traces"], strict=True
        ):
            assert len(rows) == len(report[name])  # one per update
            first, second, repeated = rows[:3]
            assert first == frozen
            assert repeated == second  # bit for bit from the checkpoint
            assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-2
            _close(rows[:3], want[:3])


def _check_computed(report):
    """Skipped rollouts change neither loss nor gradient, beyond rounding of other packs."""
    everything, few = report["computed"]
    for (loss, norm), (same_loss, same_norm) in zip(everything, few, strict=True):
        assert same_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert same_norm == pytest.approx(norm, rel=1e-5, abs=1e-7)
    for minibatch, (loss, norm) in enumerate(few):
        assert (loss, norm) == (0.0, 0.0) if minibatch in (1, 4) else norm > 1e-3


def _check_files(root, layout):
    folder = root / "-".join(map(str, layout))
    for model in ("tied", "untied"):
        source = load_file(root / model / "model.safetensors")
        exported = load_file(folder / model / "model.safetensors")
        assert exported.keys() == source.keys()
        for name, tensor in source.items():
            assert torch.equal(exported[name], tensor), f"{name} changed on the way"
    for name in OBJECTIVES:
        mine = load_file(folder / name / "model.safetensors")
        want = load_file(root / "1-1-1-1" / name / "model.safetensors")
        start = load_file(root / OBJECTIVES[name] / "model.safetensors")
        moved = max((want[key] - start[key]).abs().max().item() for key in want)
        assert moved > 1e-3
        for key, tensor in want.items():
            torch.testing.assert_close(mine[key], tensor, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)],
    ids=lambda layout: "tp{}-pp{}-cp{}-dp{}".format(*layout),
)
def test_layout_equals_one_process(root, reference, layout):
    tensor, pipeline, context, data = layout
    world_size = tensor * pipeline * context * data
    checkpoint = str(root / "1-1-1-1")
    reports = run_ranks(run_layout, world_size, str(root), layout, checkpoint)
    assert len(set(reports)) == 1  # every rank reports the same
    report = json.loads(reports[0])
    _close(report["split"], reference["split"])
    _check_demonstrations(report["sft"], root, layout)
    check_critic(report["critic"], root / "tied", make_rollouts()[0])
    for key, want in reference["adapted critic"].items():
        for mine, one in zip(report["adapted critic"][key], want, strict=True):
            assert mine == pytest.approx(one, rel=1e-3, abs=1e-4), key
    _check_traces(report, reference)
    for model in ("tied", "untied"):
        _close(report[model], reference[model])
    for name in OBJECTIVES:
        first, second, repeated, resharded = report[name]
        assert first["deviation"] == 0.0  # bit-equal between scoring and training
        assert repeated == second
        assert second["acceptance"] == pytest.approx(reference[name][1]["acceptance"], abs=1e-6)
        for step, mine in ((0, first), (1, second), (1, resharded)):
            for key in ("loss", "grad_norm", "learning_rate"):
                want = reference[name][step][key]
                assert mine[key] == pytest.approx(want, rel=1e-5, abs=1e-5), (name, step, key)
    _check_computed(report)
    _check_files(root, layout)
