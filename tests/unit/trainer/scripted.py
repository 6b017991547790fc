"""A training loop around fakes that record their calls in order."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch

from megatron_rl.actor.pace import Pace
from megatron_rl.config import parse_config
from megatron_rl.config.sections import RewardSection
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.requests import sampling_per_prompt
from megatron_rl.objectives import TokenClasses, TokenInputs, build_objective
from megatron_rl.objectives.values import ValueStatistics
from megatron_rl.rollouts.behavior import EngineLogprobs, ModelLogprobs
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.prompt_sets import PromptSets
from megatron_rl.rollouts.schedule import GroupBuffer, build_schedule
from megatron_rl.rollouts.scoring import record_routes
from megatron_rl.rollouts.source import RunContext
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import BackgroundWriter, MetricLog, PhaseClock
from megatron_rl.trainer.checkpointing import CheckpointKeeper
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.evaluation import EngineAnswers, Evaluator
from megatron_rl.trainer.loop import BatchSelector, Trainer
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.step_progress import SkippedUpdates
from megatron_rl.types import GradeResult, Prompt, Response

PROMPTS = [Prompt(i, ({"role": "user", "content": "?"},), (5, 6), "1", "toy") for i in range(8)]


@dataclass
class ScriptedActor:
    """Counts updates; its log-probs are the number of updates so far, negated."""

    events: list
    topology: Topology = field(default_factory=Topology.single)
    updates: int = 0

    unusable: tuple = ()  # updates, from 1, that have no gradient
    drifted: tuple = ()  # updates, from 1, before which every log-ratio is 1: a KL of e - 2
    calls: int = 0

    layout: str = "one"
    sharing: None = None
    has_experts: bool = False

    @property
    def routing(self):
        layers = [SimpleNamespace(number=number) for number in range(2 * self.has_experts)]
        return SimpleNamespace(
            is_active=self.has_experts, replays=True, layers=layers, own_part=lambda shard: shard
        )

    @property
    def pace(self):
        return Pace(self.topology.device)

    @property
    def packs(self):
        return SimpleNamespace(
            prepare=lambda b: SimpleNamespace(host=SequenceLayout(b.lengths, b.response_mask))
        )

    def check_weights(self): ...

    def sleep(self):
        self.events.append(("actor sleeps",))

    def wake_up(self):
        self.events.append(("actor wakes up",))

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "updates").write_text(str(self.updates))

    def load(self, folder):
        self.updates = int((folder / "updates").read_text())

    def digest(self):
        return {"layout": self.layout, "sum": str(self.updates)}

    def compute_logprobs(self, micro_batches, *, routing="default"):
        if routing == "record":
            for batch in micro_batches:
                batch.routes = torch.full((2, len(batch.tokens), 1), self.updates)
        else:
            self.events.append(("behavior", self.updates))
        return [-float(self.updates) * batch.response_mask for batch in micro_batches]

    def compute_logprobs_and_entropies(self, micro_batches):
        """Each token's entropy is half the number of updates so far."""
        logprobs = self.compute_logprobs(micro_batches)
        return [(values, -0.5 * values) for values in logprobs]

    def update(self, minibatch, objective, *, rule=None):
        from megatron_rl.actor.training import UpdateResult

        frozen = {float(b.behavior_logprobs.min()) for b in minibatch.micro_batches}
        self.events.append(("update", frozen))
        if self.has_experts:  # recorded by the weights that the behavior log-probs are of
            routes = {-float(b.routes.max()) for b in minibatch.micro_batches}
            assert routes == {min(frozen)}, (routes, frozen)
        rows = [-float(self.updates) * batch.response_mask for batch in minibatch.micro_batches]
        batch = minibatch.micro_batches[0]
        layout = SequenceLayout(batch.lengths, batch.response_mask)
        self.calls += 1
        result = objective(
            TokenInputs(
                policy_logprobs=batch.behavior_logprobs + float(self.calls in self.drifted),
                behavior_logprobs=batch.behavior_logprobs,
                advantages=batch.advantages_per_token(),
                rollout_logprobs=batch.rollout_logprobs,
                reference_logprobs=batch.reference_logprobs,
                entropy=0.5 * batch.response_mask if "entropy" in objective.needs else None,
            ),
            layout=layout,
            denominators=minibatch.denominators,
            classes=TokenClasses(batch.classes, minibatch.classes) if minibatch.classes else None,
        )
        if self.calls in self.unusable:
            self.trace(minibatch, rows)
            return UpdateResult(result.statistics, math.nan, 1e-3, "the gradient norm is nan")
        if rule is not None and (reason := rule(result.statistics)) is not None:
            return UpdateResult(result.statistics, 1.0, 1e-3, stopped=reason)
        self.trace(minibatch, rows)
        self.updates += 1
        routes = torch.tensor([[0.0, 4.0], [1.0, 4.0]]) if self.has_experts else None
        return UpdateResult(result.statistics, 1.0, 1e-3, routes=routes)

    def trace(self, minibatch, rows):
        for batch, row in zip(minibatch.micro_batches, rows, strict=True):
            if batch.traced_logprobs is not None:
                batch.traced_logprobs.append(row)


@dataclass
class ScriptedCritic:
    """Counts updates; its values are the number of updates so far, advantages the rewards."""

    events: list
    topology: Topology = field(default_factory=Topology.single)
    updates: int = 0
    unusable: tuple = ()  # updates, from 1, that have no gradient
    calls: int = 0

    pace, check_weights = ScriptedActor.pace, ScriptedActor.check_weights
    save, load, digest = ScriptedActor.save, ScriptedActor.load, ScriptedActor.digest
    layout = "one"

    def sleep(self): ...

    def wake_up(self): ...

    def compute_targets(self, micro_batches, rewards, ends, cut, *, settings):
        known = [batch.values for batch in micro_batches]
        return [
            torch.stack((self.updates * b.response_mask if v is None else v, r, r), dim=1).float()
            for b, v, r in zip(micro_batches, known, rewards, strict=True)
        ]

    def update(self, minibatch, *, clip):
        from megatron_rl.actor.training import Update

        self.events.append(("critic", {float(b.values.max()) for b in minibatch.micro_batches}))
        self.calls += 1
        sums = ValueStatistics(torch.tensor([4, 1, 0, 2, 2, 2, 1, 0.5]).double())
        if self.calls in self.unusable:
            return Update(sums, math.nan, 1e-3, "the gradient norm is nan")
        self.updates += 1
        return Update(sums, 1.0, 1e-3)


@dataclass
class ScriptedReference:
    """A frozen policy half as likely as the untrained one."""

    events: list

    def check_sources(self, sources):
        """It serves every data source."""

    def compute_logprobs(self, micro_batches, sources):
        self.events.append(("reference",))
        return [-math.log(2) * batch.response_mask for batch in micro_batches]


@dataclass
class ScriptedEngine:
    """Answers "1" and "0" in turn, with the version that was pushed last."""

    events: list
    order: Callable = iter  # in which responses end
    weight_version: int = -1
    engine_seconds: tuple = (1.0, 3.0)
    shares_devices: bool = True
    solved: tuple = ()  # prompts that every response solves

    def text(self, prompt, sample):
        return str(int(prompt.index in self.solved or sample % 2))

    def generate(
        self, prompts, *, samples, sampling, on_progress=None, on_response=None,
        on_all_ranks=True, conversations=None,
    ):  # fmt: skip
        assert not on_all_ranks  # training and evaluation leave responses where they are generated
        each = [one.seed for one in sampling_per_prompt(sampling, count=len(prompts))]
        self.events.append(("generate", self.weight_version, *dict.fromkeys(each)))
        tokens, logprobs = np.array([7, 2], np.int32), np.array([-0.1, -0.1], np.float32)
        responses = [
            Response(p.index, s, tokens, logprobs, self.text(p, s), "stop", self.weight_version)
            for p in prompts
            for s in range(samples)
        ]
        for place in self.order(range(len(responses))):
            on_response(place, responses[place])
        return responses

    def sleep(self):
        self.events.append(("engine sleeps",))

    def sync_weights(self, actor, *, version):
        self.events.append(("push", version, actor.updates))
        self.weight_version = version

        class Stats:
            def to_metrics(self):
                return {"sync/seconds": 0.0, "sync/bytes_sent": 0.0}

        return Stats()


class ConversingEngine(ScriptedEngine):
    """Each response is a conversation of two turns with one observed token between them.

    Odd samples get 1 from the environment; the others are graded by the verifier.
    """

    environment_costs: ClassVar = {
        "answers": 4, "seconds": 1.0, "context_tokens": 8, "cached_tokens": 2
    }  # fmt: skip

    def generate(self, prompts, *, on_response, **options):
        def give(place, response):
            rewards = [0.25, 0.75]
            grade = GradeResult(1.0, "scripted", None, turn_rewards=rewards)
            grade = grade if response.sample_index % 2 else None
            replies = tuple({"role": "assistant", "content": text} for text in ("ask", "say"))
            converted[place] = replace(
                response, token_ids=np.array([7, 5, 2], np.int32), observed=((1, 2),), grade=grade,
                messages=(replies[0], {"role": "user", "content": "5"}, replies[1]),
            )  # fmt: skip
            on_response(place, converted[place])

        converted = {}
        responses = super().generate(prompts, on_response=give, **options)
        return [converted[place] for place in range(len(responses))]


class ScriptedPool:
    """Grade by the text; the first responses get these reasons for no reward."""

    settings = RewardSection()
    num_graded = 0
    is_within_limits = False

    def __init__(self, *reasons, named=False):
        self.reasons, self.named = list(reasons), named

    def begin(self):
        self.items = {}
        return self

    def submit(self, place, item):
        self.items[place] = item

    def finish(self, *, on_progress):
        return dict(zip(self.items, self.verify_all(self.items.values()), strict=True))

    def verify_all(self, items):
        return [
            GradeResult(0.0, self.reasons.pop(0), None)
            if self.reasons
            else self._grade(float(i.text == i.ground_truth), i.text)
            for i in items
        ]

    def _grade(self, reward, text):
        return GradeResult(reward, "equal", text, rewards={"correct": reward} if self.named else {})


class NoCheckpoints:
    """Saves nothing; interrupted after step `last`."""

    step_progress = None

    def __init__(self, last):
        self.saved, self.last, self.done = [], last, 0

    def begin(self, new, actor):
        if actor.has_experts:
            record_routes(new.batch, actor)
        return new

    def finish(self, step):
        self.done = step

    def save_if_due(self, actor, step):
        self.saved.append(step)

    def stop_if_requested(self, actor):
        if self.done == self.last:
            raise RunInterrupted


def make_config(*, sections=None, **trainer):
    return parse_config(
        {
            **(sections or {}),
            "model": {"path": "m"}, "data": {"train": "t"}, "run": {"name": "r"},
            "rollout": {"prompts_per_step": 4, "responses_per_prompt": 4},
            "trainer": {"steps": 2, "epochs": 3, "minibatches": 2} | trainer,
            "eval": {"sets": {"held": "h"}, "every": 2, "samples": 2},
            "logging": {"tensorboard": False} | (sections or {}).get("logging", {}),
        }
    )  # fmt: skip


def make_keeper(config, directory, *, rank=0, wait=lambda: None):
    """Return a keeper of checkpoints whose run has no rollouts and no skipped updates yet."""
    console = Console(is_main_rank=False)
    buffer, faults = GroupBuffer(build_schedule(config)), SkippedUpdates(directory, console)
    return CheckpointKeeper(
        config, directory, console, rank=rank, wait_for_records=wait, buffer=buffer, faults=faults
    )


def run_loop(
    tmp_path, *, done=0, last=None, reasons=(), trainer=None, order=iter, unusable=(),
    sections=None, checkpoints=None, updates=0, held=(), events=None, keep=None,
    layout="one", writer=None, drifted=(), solved=(), named=False, has_experts=False,
    engine=ScriptedEngine, conversations=None, critic_unusable=(), **overrides
):  # fmt: skip
    """keep: an Interruption; checkpoints are then real, and the run goes on from what is there."""
    config = make_config(sections=sections, **(trainer or {}))
    events = [] if events is None else events
    actor = ScriptedActor(
        events, updates=updates, unusable=unusable, layout=layout, drifted=drifted,
        has_experts=has_experts,
    )  # fmt: skip
    critic = None
    if config.critic is not None:
        critic = ScriptedCritic(events, unusable=critic_unusable)
    engine = engine(events, order, solved=solved)
    buffer = GroupBuffer(build_schedule(config), {group.slot: group for group in held})
    checkpoints = checkpoints or NoCheckpoints(last)
    checkpoints.buffer = buffer
    directory = RunDirectory(tmp_path)
    directory.create(config)
    console = Console(is_main_rank=False)
    grader = Grader(ScriptedPool(*reasons, named=named), actor.topology)
    plain = config.logging.model_copy(update={"tensorboard": False})
    log = MetricLog(tmp_path, config.model_copy(update={"logging": plain}))
    clock = PhaseClock()
    recorder = Recorder(config, directory, log, console, clock, writer or BackgroundWriter())
    faults = SkippedUpdates(directory, console)
    if keep is not None:
        checkpoints = CheckpointKeeper(
            config, directory, console, rank=0, wait_for_records=recorder.wait, buffer=buffer,
            faults=faults, interruption=keep, critic=critic,
        )  # fmt: skip
        checkpoints.restore(actor)
    else:
        checkpoints.done = done
    objective = build_objective("pnpo", **overrides)
    run = RunContext(config, actor, objective, buffer, console, clock)
    prompts = PromptSets(PROMPTS, PromptOrder(len(PROMPTS), seed=0), {"held": PROMPTS[:2]})
    behavior = EngineLogprobs() if config.behavior == "engine" else ModelLogprobs(actor)
    source = EngineSource(run, engine, grader, prompts, behavior, conversations)
    source.check = lambda: None  # the scripts compute nothing that could agree
    trainer = Trainer(
        run=run,
        engine=engine,
        source=source,
        selector=BatchSelector(run, ScriptedReference(events) if "kl" in overrides else None),
        evaluator=Evaluator(
            config,
            EngineAnswers(config, engine, grader, prompts.evaluation, console),
            prompts.evaluation,
            recorder,
            console,
        ),
        checkpoints=checkpoints,
        recorder=recorder,
        faults=faults,
        critic=critic and CriticTrainer(run, critic, checkpoints, faults),
    )
    with contextlib.suppress(RunInterrupted):
        trainer.train()
    recorder.wait()
    return events, trainer
