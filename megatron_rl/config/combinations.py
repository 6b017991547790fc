"""The features of a run, each with the features that it refuses.

A feature owns its row. A pair is refused, with the reason, where both features are on; everything
else may be combined. The page of settings prints the table, and the tests try every pair.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.objectives.spec import ObjectiveSpec


@dataclass(frozen=True)
class Feature:
    """A feature of a run.

    setting: returns the setting of a `Config` that turns it on, "" where it is off.
    example: settings that turn it on. refuses: reasons by the names of other features.
    """

    setting: Callable[[Any], str]
    example: tuple[str, ...]
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The first setting of the example, without its value."""
        return self.example[0].partition("=")[0]


def _shown(key: str, value: Callable[[Any], Any], *, off: tuple[Any, ...] = ()) -> Any:
    """Return a `Feature.setting` that shows the value; it is off at these values and at None."""

    def setting(config: Any) -> str:
        found = value(config)
        return "" if found is None or found in off else f"{key}={found}"

    return setting


def _named(key: str, is_on: Callable[[Any], Any]) -> Any:
    """Return a `Feature.setting` without a value."""
    return lambda config: key if is_on(config) else ""


def _all(names: Iterable[str], reason: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


_GENERATION = ("self-tests", "dynamic sampling", "environments", "engines on ranks of their own",
               "top-k", "top-p", "min-p")  # fmt: skip
_LAG = ("a queue", "a lag policy", "weights synced less often", "partial rollouts", "replay")

FEATURES: dict[str, Feature] = {
    "offline rollouts": Feature(
        _named("offline.rollouts", lambda c: c.offline.rollouts is not None),
        ("offline.rollouts=a",),
        {**_all((*_GENERATION, "evaluation", "partial rollouts"),
                "the responses are given, and no engine generates"),
         "passes over the prompts": "it reads no prompts"},
    ),
    "supervised fine-tuning": Feature(
        _named("sft", lambda c: c.sft is not None),
        ("sft={}",),
        {**_all(_GENERATION, "the answers are given, and an engine generates to evaluate alone"),
         **_all((*_LAG, "the engine's log-probs", "offline rollouts", "reward shaping",
                 "early stopping"),
                "it trains given answers once, without rewards, ratios or lag"),
         "a sampling temperature": "the loss is cross entropy, at a temperature of 1"},
    ),
    "partial rollouts": Feature(
        _named("lag.partial_rollouts", lambda c: c.lag.partial_rollouts is not None),
        ("lag.partial_rollouts={every_tokens: 8, cache: recompute}",),
        {"weights synced less often": "both set when weights are synced",
         "prefix caching": "a cached prefix may be of older weights",
         "asynchronous scheduling": "each step must return its own tokens",
         "stop texts": "a stop text may span a weight sync; use rollout.stop_token_ids instead",
         "dynamic sampling": "the responses of a group end in different steps",
         "environments": "the state of an environment is in no checkpoint, so a conversation "
                         "cannot continue in a later step"},
    ),
    "routing replay": Feature(
        _shown("model.routing_replay", lambda c: c.model.routing_replay, off=("none",)),
        ("model.routing_replay=behavior",),
        _all(("the engine's log-probs", *_LAG, "supervised fine-tuning", "offline rollouts"),
             "routes are recorded only where the actor computes the behavior log-probs of the "
             "rollouts that it trains in the same step"),
    ),
    "routing replay of the engine": Feature(
        _named("model.routing_replay=engine", lambda c: c.model.routing_replay == "engine"),
        ("model.routing_replay=engine",),
        {"environments": "the routes of several turns are not put together; set it to behavior"},
    ),
    "LoRA": Feature(
        lambda c: "lora" if c.lora else "critic.lora" if c.critic and c.critic.lora else "",
        ("lora.rank=8", "optimizer.learning_rate=1e-4"),
        {"fp8": "adapters have not been tried with products in fp8"},
    ),
    "a critic": Feature(
        _named("critic", lambda c: c.critic is not None),
        ("critic={}",),
        {"supervised fine-tuning": "given answers have no rewards"},
    ),
    "divergences over the vocabulary": Feature(
        _named("objective.kl over the whole vocabulary",
               lambda c: isinstance(c.objective.choice, ObjectiveSpec)
               and "divergence" in c.objective.choice.needs),
        ("objective={name: grpo, kl: {coefficient: 1, estimator: jsd}}",),
        _all(("top-k", "top-p", "min-p"),
             "the policy that generates is over the tokens that its sampler kept; set "
             "objective.kl.estimator=k3"),
    ),
    "a queue": Feature(_shown("lag.batches", lambda c: c.lag.batches, off=(0,)),
                       ("lag.batches=1",)),
    "a lag policy": Feature(_shown("lag.policy", lambda c: c.lag.policy), ("lag.policy=a:B",)),
    "weights synced less often": Feature(
        _shown("lag.sync_weights_every", lambda c: c.lag.sync_weights_every, off=(1,)),
        ("lag.sync_weights_every=2",),
    ),
    "replay": Feature(_shown("replay.fresh", lambda c: c.replay.fresh, off=(1,)),
                      ("replay.fresh=0.5", "replay.capacity=2")),
    "the engine's log-probs": Feature(
        _shown("behavior", lambda c: c.behavior, off=("actor",)), ("behavior=engine",)
    ),
    "engines on ranks of their own": Feature(
        _shown("parallel.engine_ranks", lambda c: c.parallel.engine_ranks),
        ("parallel.engine_ranks=2", "lag.batches=1"),
    ),
    "environments": Feature(
        _shown("environment.name", lambda c: c.environment and c.environment.name),
        ("environment={name: 'a:b', max_context_tokens: 99999}",),
    ),
    "dynamic sampling": Feature(
        _shown("dynamic_sampling.rounds", lambda c: c.dynamic_sampling.rounds, off=(0,)),
        ("dynamic_sampling.rounds=1",),
    ),
    "evaluation": Feature(_named("eval.sets", lambda c: c.eval.sets), ("eval.sets={a: b}",)),
    "self-tests": Feature(
        _shown("trainer.self_test_every", lambda c: c.trainer.self_test_every),
        ("trainer.self_test_every=1",),
    ),
    "early stopping": Feature(
        _named("early_stopping", lambda c: c.early_stopping.acceptance or c.early_stopping.kl),
        ("early_stopping.kl=0.1",),
    ),
    "reward shaping": Feature(
        _named("shaping", lambda c: c.shaping != type(c.shaping)()), ("shaping.signed=true",)
    ),
    "passes over the prompts": Feature(
        _shown("data.epochs", lambda c: c.data.epochs), ("data.epochs=2",)
    ),
    "a sampling temperature": Feature(
        _shown("rollout.temperature", lambda c: c.rollout.temperature, off=(1,)),
        ("rollout.temperature=0.5",),
    ),
    "top-k": Feature(_shown("rollout.top_k", lambda c: c.rollout.top_k), ("rollout.top_k=9",)),
    "top-p": Feature(_shown("rollout.top_p", lambda c: c.rollout.top_p, off=(1,)),
                     ("rollout.top_p=0.9", "rollout.top_k=9")),
    "min-p": Feature(_shown("rollout.min_p", lambda c: c.rollout.min_p, off=(0,)),
                     ("rollout.min_p=0.1", "rollout.top_k=9")),
    "stop texts": Feature(_named("rollout.stop", lambda c: c.rollout.stop), ("rollout.stop=[x]",)),
    "prefix caching": Feature(
        _named("rollout.engine.enable_prefix_caching",
               lambda c: c.rollout.engine.get("enable_prefix_caching")),
        ("rollout.engine={enable_prefix_caching: true}",),
    ),
    "asynchronous scheduling": Feature(
        _named("rollout.engine.async_scheduling",
               lambda c: c.rollout.engine.get("async_scheduling")),
        ("rollout.engine={async_scheduling: true}",),
    ),
    "fp8": Feature(_shown("model.fp8", lambda c: c.model.fp8), ("model.fp8=tensorwise",)),
}  # fmt: skip


def combination_problems(config: Any) -> list[str]:
    """List the pairs of features of a `Config` that cannot be combined, with reason and cure."""
    on = {name: setting for name, one in FEATURES.items() if (setting := one.setting(config))}
    return [
        f"{mine} cannot be combined with {on[other]}: {reason}; unset one of them"
        for name, mine in on.items()
        for other, reason in FEATURES[name].refuses.items()
        if other in on
    ]


def reason_routes_unrecorded(config: Any) -> str | None:
    """Return the setting of a `Config` that prevents recording; None if routes are recorded.

    Routes stay on the ranks that compute behavior log-probs, with the packs that are trained: those
    log-probs must be the actor's, computed in the step that trains them.
    """
    others = FEATURES["routing replay"].refuses
    return next(filter(None, (FEATURES[name].setting(config) for name in others)), None)
