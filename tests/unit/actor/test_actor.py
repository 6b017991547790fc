"""Updates: learning rates, statistics of all ranks, skipped steps."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.training import learning_rate_at
from megatron_rl.config import parse_config
from megatron_rl.config.sections import OptimizerSection
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives.statistics import DECILES, Statistics
from megatron_rl.trainer.actor_settings import build_actor_settings
from tests.functional.test_actor_layouts import VOCAB, make_model, make_rollouts
from tests.ranks import run_ranks
from tests.unit.objectives.mutate import mutated


def _rates(count, *, warmup_updates, **optimizer):
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=1.0, **optimizer),
        warmup_updates=warmup_updates,
        total_updates=8,
    )
    return [learning_rate_at(update, settings) for update in range(count)]


def test_warmup_starts_above_zero_and_ends_at_full_rate():
    assert _rates(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert _rates(2, warmup_updates=0) == [1.0, 1.0]


def test_decays_reach_minimum_at_last_update():
    linear = _rates(9, warmup_updates=4, decay="linear", min_learning_rate=0.2)
    assert linear[4:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = _rates(8, warmup_updates=4, decay="cosine")
    assert cosine[5] == pytest.approx(0.5)  # half-way: cos(pi / 2) = 0
    assert cosine[7] == pytest.approx(0.0)


def test_policys_decay_ends_at_its_last_update_also_behind_a_critics_warm_up():
    """5 steps of 2 updates; the first 3 train the critic alone."""
    values = {
        "model": {"path": "m"}, "data": {"train": "t"}, "critic": {"warmup_steps": 3},
        "optimizer": {
            "learning_rate": 1.0, "decay": "linear", "min_learning_rate": 0.25, "warmup_steps": 0
        },
        "rollout": {"prompts_per_step": 2}, "trainer": {"steps": 5, "minibatches": 2, "epochs": 1},
    }  # fmt: skip
    settings = build_actor_settings(parse_config(values), Topology.single())
    rates = [learning_rate_at(update, settings) for update in range(4)]
    assert rates == pytest.approx([0.8125, 0.625, 0.4375, 0.25])


LAYOUTS = ({"tensor": 2, "pipeline": 2}, {"context": 2})


def reduce_perturbed(rank, world_size):
    """Each rank adds its own number of ulps, as a device that adds in any order does."""
    from megatron.core import parallel_state

    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import reduce_statistics

    results = []
    for layout in LAYOUTS:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        topology = groups.initialise(**layout)
        report = Statistics.empty(classes=1)
        # Of one band 100 tokens inside, with weights 0.9 whose squares are 0.81.
        row = report.bands()[0][DECILES - 1]
        row[0], row[11], row[12] = 100.0, 90.0, 81.0
        report.maxima.zero_()
        report.classes.fill_(1 / 3)
        for part in report.tensors:
            for _ in range(rank):
                part.copy_(torch.nextafter(part, part.new_tensor(torch.inf)))
        total = reduce_statistics([report] * 3, classes=1, topology=topology)
        fraction = total.everything().effective_sample_fraction()
        results.append(([part.numpy().tobytes() for part in total.tensors], fraction))
    return results


def test_ranks_differing_in_last_bit_decide_identically():
    first, *others = run_ranks(reduce_perturbed, 4)
    for parts, fraction in first:
        assert len(parts) == 3 and 0.9 < fraction < 1.1
    assert all(other == first for other in others)


def _make_actor(root):
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection

    topology = groups.initialise()
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=1e-2, max_grad_norm=0.5), warmup_updates=0
    )
    return MegatronActor(root, topology=topology, settings=settings)


def _make_minibatch(actor, tokens_per_micro_batch=200):
    from megatron_rl.data.packing import plan_minibatches

    (minibatch,) = plan_minibatches(
        *make_rollouts(),
        minibatches=1,
        tokens_per_micro_batch=tokens_per_micro_batch,
        topology=actor.topology,
    )
    packs = minibatch.micro_batches
    for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
        pack.behavior_logprobs = logprobs
    return minibatch


def _state(actor):
    """Copy the weights and both moments of every parameter."""
    tensors = [p.detach().clone() for p in actor.named_parameters_local().values()]
    for part in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        for entry in part.optimizer.state.values():
            tensors += [entry["exp_avg"].clone(), entry["exp_avg_sq"].clone()]
    return tensors


def _unchanged(actor, before):
    return all(torch.equal(a, b) for a, b in zip(_state(actor), before, strict=True))


def update_with_bad_numbers(rank, world_size, root):
    """Why updates are skipped when the last rank alone has a bad number; then a good update."""
    from megatron_rl.objectives import build_objective

    actor = _make_actor(root)
    minibatch = _make_minibatch(actor)
    objective = build_objective("grpo")
    before, is_bad = _state(actor), rank == world_size - 1
    pack = minibatch.micro_batches[-1]
    good, advantages = pack.behavior_logprobs.clone(), pack.advantages.clone()
    if is_bad:
        pack.behavior_logprobs[pack.response_mask.nonzero()[0]] = float("nan")
    named = actor.update(minibatch, objective).skipped
    assert _unchanged(actor, before) and actor.updates == 0
    pack.behavior_logprobs = good
    if is_bad:
        pack.advantages.fill_(3e38)  # every loss is finite, the norm of their gradient is not
    overflow = actor.update(minibatch, objective).skipped
    assert _unchanged(actor, before) and actor.updates == 0
    pack.advantages.copy_(advantages)
    result = actor.update(minibatch, objective)
    assert result.skipped is None and not _unchanged(actor, before) and actor.updates == 1
    assert result.grad_norm > actor.settings.optimizer.max_grad_norm  # it was clipped on the way
    actor.check_weights()
    _try_self_tests(actor, objective)
    last = list(actor.named_parameters_local().values())[-1]
    last.data.view(-1)[-1] = float("nan")
    with pytest.raises(FloatingPointError, match="1 parameters are not finite, first "):
        actor.check_weights()
    return named, overflow


def _try_self_tests(actor, objective):
    """They pass and add no row to traces; each fails by its name where its contract is broken."""
    from megatron_rl.telemetry.console import Console
    from megatron_rl.trainer.self_tests import SelfTestError, SelfTests

    def fail():
        raise RuntimeError("engine 0 differs")

    minibatch, output, engine = _make_minibatch(actor), [], SimpleNamespace(weight_version=-1)
    for pack in minibatch.micro_batches:
        pack.traced_logprobs = []
    batch = SimpleNamespace(minibatches=[minibatch], is_exact=True)
    console = Console(is_main_rank=False)
    console.echo = output.append
    config = SimpleNamespace(trainer=SimpleNamespace(self_test_every=2))
    run = SimpleNamespace(config=config, actor=actor, objective=objective, console=console)
    tests = SelfTests(run, engine, SimpleNamespace(check=fail))
    before, updates = _state(actor), actor.updates
    for step in (1, 2):
        tests.before_updates(step, batch, done=0)
        tests.after_weight_sync(step)  # nothing was pushed
    of_updates = "first_ratio, zero_rate_weights, zero_rate_ratios"
    assert output == [
        f"step 2: self-tests passed: {of_updates}",
        "step 2: not compared: engine_weights (no weights were pushed in this step)",
    ]
    assert all(pack.traced_logprobs == [] for pack in minibatch.micro_batches)
    actor.update(minibatch, objective, rule=lambda evidence: "reuse ends")
    assert all(pack.traced_logprobs == [] for pack in minibatch.micro_batches)
    tests.before_updates(4, batch, done=3)
    tests.after_weight_sync(4)
    assert output[2:] == [
        "step 4: self-tests passed: none",
        f"step 4: not compared: {of_updates} (the run was resumed after update 3 of the step)",
        "step 4: not compared: engine_weights (no weights were pushed in this step)",
    ]
    assert _unchanged(actor, before) and actor.updates == updates
    assert actor.settings.optimizer.learning_rate == 1e-2
    engine.weight_version = 4
    with pytest.raises(SelfTestError, match="engine_weights failed in step 4: engine 0 differs"):
        tests.after_weight_sync(4)
    right = minibatch.micro_batches[0].behavior_logprobs
    minibatch.micro_batches[0].behavior_logprobs = right * 1.01
    with pytest.raises(SelfTestError, match="first_ratio failed in step 4: a ratio deviates"):
        tests.before_updates(4, batch, done=0)
    batch.is_exact = False  # a group is older than the policy: the ratios may be anything
    tests.before_updates(4, batch, done=0)
    engine.weight_version = -1
    tests.after_weight_sync(4)
    assert output[5] == "step 4: self-tests passed: zero_rate_weights, zero_rate_ratios"
    assert output[6].startswith("step 4: not compared: first_ratio (the log-probs of this batch")
    batch.is_exact = True
    minibatch.micro_batches[0].behavior_logprobs = torch.full_like(right, float("nan"))
    tests.before_updates(4, batch, done=0)
    tests.after_weight_sync(4)
    assert output[8] == "step 4: self-tests passed: none"
    assert output[9].startswith(
        f"step 4: not compared: {of_updates} (the trial update was skipped: "
    )
    minibatch.micro_batches[0].behavior_logprobs = right.clone()
    update = type(actor).update

    def drift(minibatch, *arguments):
        result = update(actor, minibatch, *arguments)
        minibatch.micro_batches[0].behavior_logprobs *= 1.01
        return result

    actor.update = drift
    with pytest.raises(SelfTestError, match=r"zero_rate_ratios failed in step 4: .* 0 and then by"):
        tests.before_updates(4, batch, done=0)
    minibatch.micro_batches[0].behavior_logprobs = right

    def fail_update(*arguments):
        result = update(actor, *arguments)
        next(iter(actor.named_parameters_local().values())).data.view(-1)[0] += 1e-3
        return result

    actor.update = fail_update
    with pytest.raises(SelfTestError, match=r"zero_rate_weights failed in step 4: weights of 2 ra"):
        tests.before_updates(4, batch, done=0)
    del actor.update


def check_updates(rank, world_size, root):
    """Criteria of updates: a rule and a resolved constraint."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.objectives import build_objective

    actor = _make_actor(root)
    minibatch, objective = _make_minibatch(actor), build_objective("grpo")
    generator = torch.Generator().manual_seed(3)  # by response: other ranks pack them elsewhere
    noise = 0.1 * torch.randn(16, 64, generator=generator)
    for pack in minibatch.micro_batches:
        start = 0
        for index, length in zip(pack.rollout_indices, pack.lengths, strict=True):
            own = pack.response_mask[start : start + length]
            part = pack.behavior_logprobs[start : start + length]
            part[own] -= noise[index, : int(own.sum())].abs()
            start += length
    before, seen = _state(actor), []

    def refuse(statistics):
        seen.append(statistics.to_metrics()["tokens"])
        return "seen enough"

    refused = actor.update(minibatch, objective, rule=refuse)
    assert (refused.stopped, refused.skipped, refused.done) == ("seen enough", None, False)
    assert _unchanged(actor, before) and actor.updates == 0
    made = actor.update(minibatch, objective, rule=lambda statistics: None)
    assert made.done and not _unchanged(actor, before) and actor.updates == 1
    assert made.learning_rate == actor.settings.optimizer.learning_rate
    fresh = MegatronActor(root, topology=actor.topology, settings=actor.settings)
    fitted = fresh.update(minibatch, build_objective("m2po", constraint={"threshold": 4e-3}))
    acceptance = fitted.statistics.to_metrics()["gate/acceptance"]
    assert 0.5 < acceptance < 1
    fresh = MegatronActor(root, topology=actor.topology, settings=actor.settings)
    balanced = fresh.update(minibatch, build_objective("balanced")).grad_norm
    return seen[0], refused.grad_norm, acceptance, fitted.grad_norm, balanced


def build_averaging_megatrons(rank, world_size, root):
    """Return the messages of `assert_sum_semantics` for each kind of rescaling."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_rl.actor.loss_contract import assert_sum_semantics

    actor = _make_actor(root)
    config, ddp_chunks = actor.chunks[0].config, actor.ddp_chunks
    assert_sum_semantics(ddp_chunks, config=config)
    messages = []
    for change in (
        {"calculate_per_token_loss": False},
        {"finalize_model_grads_func": finalize_model_grads},
    ):
        with pytest.raises(AssertionError) as error:
            assert_sum_semantics(ddp_chunks, config=dataclasses.replace(config, **change))
        messages.append(str(error.value))
    ddp_chunks[0].buffers[0].gradient_scaling_factor = 0.25
    with pytest.raises(AssertionError) as error:
        assert_sum_semantics(ddp_chunks, config=config)
    return [*messages, str(error.value)]


def norms_of_one_and_several_micro_batches(rank, world_size, root):
    """Gradient norms of the first update in one and in several micro-batches, as is and divided."""
    from megatron_rl.actor import loss_contract
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.objectives import build_objective

    actor = _make_actor(root)

    def norm(tokens_per_micro_batch):
        fresh = MegatronActor(root, topology=actor.topology, settings=actor.settings)
        minibatch = _make_minibatch(fresh, tokens_per_micro_batch)
        return fresh.update(minibatch, build_objective("grpo")).grad_norm

    as_is = norm(10_000), norm(200)
    with mutated(
        loss_contract.finalize_gradients, "list(chunks), None", "list(chunks), num_tokens"
    ):
        return as_is, (norm(10_000), norm(200))


def time_updates(rank, world_size, root):
    """Seconds of replicas by a clock that passes and waiting move on: 1 and 10 s, and 100."""
    from megatron_rl.actor import loss_contract, pace
    from megatron_rl.objectives import build_objective

    actor, now = _make_actor(root), [0.0]
    minibatch = _make_minibatch(actor, 10_000)  # one pass
    pace.time = SimpleNamespace(perf_counter=lambda: now[0])
    reduce = loss_contract.megatron_finalize_model_grads

    def move(seconds):
        now[0] += seconds

    def wait(*given, **settings):
        move(100.0)
        reduce(*given, **settings)

    loss_contract.megatron_finalize_model_grads = wait
    actor.chunks[0].register_forward_pre_hook(lambda *_: move([1.0, 10.0][rank]))
    found = []
    for updates in (1, 2, 0):
        for _ in range(updates):
            actor.update(minibatch, build_objective("grpo"))
            actor.compute_logprobs(minibatch.micro_batches)  # not an update
        found.append(pace.gather_paces([actor.pace], topology=actor.topology))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("update") / "model"
    make_model(folder, tied=True)
    return folder


def test_non_finite_values_never_reach_weights(model):
    messages = run_ranks(update_with_bad_numbers, 2, model)
    assert messages[0] == messages[1]  # all ranks skip, for the same reason
    named, overflow = messages[0]
    assert "behavior_logprobs" in named and "position 1" in named and "is not finite" in named
    assert overflow in ("the gradient norm is inf", "the gradient norm is nan")


def test_seconds_of_a_slow_replica_are_its_own(model):
    one, other = run_ranks(time_updates, 2, model)
    assert one == other == [{(0,): 1.0, (1,): 10.0}, {(0,): 2.0, (1,): 20.0}, {}]


def test_assert_sum_semantics_refuses_averaging(model):
    (messages,) = run_ranks(build_averaging_megatrons, 1, model)
    loss, finalize, buffers = messages
    # Each of seven micro-batches would count for a seventh: 3 / 7.
    assert "turned a loss of 3 into 0.42857" in loss
    assert "divide gradients by a token count" in finalize
    assert "scaled by 0.25" in buffers


def test_finalize_that_divides_changes_gradient(model):
    # The loss contract reports one token per micro-batch, so dividing by them is dividing by their
    # number: one micro-batch hides it, several do not.
    ((as_is, divided),) = run_ranks(norms_of_one_and_several_micro_batches, 1, model)
    assert as_is[1] == pytest.approx(as_is[0], rel=1e-4)
    assert divided[0] == pytest.approx(as_is[0], rel=1e-4)
    assert divided[1] < 0.6 * as_is[1]


def test_update_criteria_use_whole_minibatch_on_any_number_of_ranks(tmp_path):
    make_model(tmp_path / "untied", tied=False)
    (alone,) = run_ranks(check_updates, 1, tmp_path / "untied")
    both = run_ranks(check_updates, 2, tmp_path / "untied")
    assert both[0] == both[1]
    assert both[0] == pytest.approx(alone, rel=1e-4)


def update_a_deeper_critic(rank, world_size, root):
    """The critic has two layers with experts, and packs the routes of a policy with one."""
    from megatron_rl.actor.critic import Critic

    actor = _make_actor(root / "policy")
    minibatch = _make_minibatch(actor)
    packs = minibatch.micro_batches
    actor.compute_logprobs(packs, routing="record")
    assert all(len(pack.routes) == 1 for pack in packs)
    critic = Critic(root / "critic", topology=actor.topology, settings=actor.settings)
    for pack in packs:
        pack.values, pack.returns = torch.zeros(2, len(pack.tokens)) + pack.response_mask
    return critic.update(minibatch, clip=None).grad_norm


def test_a_critic_chooses_experts_of_its_own(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    for name, layers in (("policy", 1), ("critic", 2)):
        config = Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=8, max_position_embeddings=256,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / name)
    (norm,) = run_ranks(update_a_deeper_critic, 1, tmp_path)
    assert norm > 0
