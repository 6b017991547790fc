"""Warnings about runs that cannot learn or whose numbers mislead, each with a suggestion."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.objectives import ObjectiveSpec
from megatron_rl.objectives.named import WIDEST, suggest_tolerances
from megatron_rl.objectives.spec import Bounds, distills_alone
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.types import Minibatch, TokenBatch

WARN_ABOVE = 0.1  # fraction of the variance
NAME = "routing/log_ratio_variance_fraction"


def measure_routing(actor: MegatronActor, minibatch: Minibatch) -> dict[str, float]:
    """Score one pack of each replica with the recorded and with the router's own choices.

    The metric is the variance, over responses, of the difference that the choices make to the mean
    log-ratio of a response, divided by the variance of that mean log-ratio as it is trained. Empty
    without recorded routes, nan for a policy that has not moved and for packs without a response.
    Collective.
    """
    pack = minibatch.micro_batches[0]
    if pack.routes is None:
        return {}
    recorded, own = (
        _mean_log_ratios(pack, actor.compute_logprobs([pack], routing=routing)[0])
        for routing in ("recorded", "own")
    )
    used = recorded if actor.routing.replays else own
    sums = torch.stack([_moments(used), _moments(own - recorded)])  # [2, 3]
    sums = reduce_sum(sums.to(actor.topology.device), group=actor.topology.dp_group)
    if not sums[0, 0]:  # every reward was equal, so nothing is trained
        return {NAME: float("nan")}
    total, difference = ((s2 / n - (s1 / n) ** 2) for n, s1, s2 in sums.tolist())
    return {NAME: difference / total if total > 0 else float("nan")}


def routing_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if changed experts cause much of the drift; else None."""
    fraction = metrics.get(NAME, 0.0)
    if not fraction > WARN_ABOVE:
        return None
    return (
        f"warning: {fraction:.0%} of the variance of responses' log-ratios comes from tokens that "
        "are assigned to other experts than in the behavior pass (routing/changed_fraction = "
        f"{metrics['routing/changed_fraction']:.2f}); model.routing_replay=behavior replays them"
    )


def _mean_log_ratios(pack: TokenBatch, logprobs: Tensor) -> Tensor:
    """Mean log-ratio to the behavior policy of each response in a pack; [responses] float64."""
    assert pack.behavior_logprobs is not None, "compute behavior log-probs before"
    ratios = (logprobs - pack.behavior_logprobs.to(logprobs.device)).double().cpu()
    ends = [0, *torch.tensor(pack.lengths).cumsum(0).tolist()]
    masks = [pack.response_mask[first:end].cpu() for first, end in pairwise(ends)]
    means = [
        ratios[first:end][mask].mean()
        for (first, end), mask in zip(pairwise(ends), masks, strict=True)
        if mask.any()
    ]
    return torch.stack(means) if means else torch.empty(0, dtype=torch.float64)


def _moments(values: Tensor) -> Tensor:
    """Number, sum and sum of squares; [3]."""
    return torch.stack([torch.tensor(float(len(values)), dtype=torch.float64),
                        values.sum(), values.square().sum()])  # fmt: skip


TOO_TIGHT, TOO_WIDE = 0.7, 0.999  # acceptance below, above
UNUSUAL_REWARD = 10.0
REPEAT_EVERY = 10  # steps without a useful gradient, between two warnings
SECTION = 'docs/objectives.md, "Which tolerances for my response length?"'


@dataclass
class LearningCheck:
    """Collects the warnings of each step; unusual rewards and tolerances are reported once.

    A step without any advantage is reported the first time and every tenth time after it.
    """

    config: Config
    reported: set[str] = field(default_factory=set)
    useless_steps: int = 0
    has_learned: bool = False  # an earlier step had advantages

    def count(self, zero_fraction: float) -> None:
        """Count a step by its fraction of responses without advantage."""
        self.has_learned |= zero_fraction < 1

    def warnings(self, metrics: Mapping[str, float], batch: RolloutBatch) -> list[str]:
        """The warnings about the rollout batch that a step has trained on."""
        has_signal = bool(batch.learns.any()) or distills_alone(self.config.objective.choice)
        once = {
            "size": describe_reward_size(batch),
            "partial": describe_partial_reward(metrics, batch),
            # Without advantages nothing is learned, at any learning rate and with any bounds.
            "tolerances": describe_tolerances(metrics, self.config) if has_signal else None,
            "routing": routing_warning(metrics) if has_signal else None,
        }
        new = {key: text for key, text in once.items() if text and key not in self.reported}
        self.reported |= new.keys()
        no_learning = describe_no_learning(batch, self.config, has_learned=self.has_learned)
        self.count((~batch.learns).float().mean().item())
        self.useless_steps += no_learning is not None
        if no_learning and self.useless_steps % REPEAT_EVERY == 1:
            repeated = f" ({self.useless_steps} such steps)" if self.useless_steps > 1 else ""
            return [no_learning + repeated, *new.values()]
        return [*new.values()]


def describe_slow_packs(config: Config) -> str | None:
    """Warning if the longest sequence does not fit into a pack."""
    budget, longest = config.trainer.tokens_per_micro_batch, config.max_packed_tokens
    if budget >= longest:
        return None
    return (
        f"warning: trainer.tokens_per_micro_batch={budget} is below the longest prompt plus "
        f"response ({longest} tokens): micro-batches contain about one response each, which is "
        f"several times slower; set it to {longest} or more"
    )


def describe_dynamic_sampling(config: Config) -> str | None:
    """Warning if groups that dynamic sampling replaces would be trained."""
    trains_equal = {
        "advantage.estimator=raw": config.advantage.estimator == "raw",
        f"advantage.shift={config.advantage.shift}": config.advantage.shift != 0,
        "objective.advantage_coefficient=0": distills_alone(config.objective.choice),
    }
    given = [setting for setting, trains in trains_equal.items() if trains]
    if not config.dynamic_sampling.rounds or not given:
        return None
    return (
        f"warning: dynamic_sampling.rounds={config.dynamic_sampling.rounds} replaces groups whose "
        f"rewards are all equal, but with {given[0]} these are trained too; unset one"
    )


def describe_no_learning(
    batch: RolloutBatch, config: Config, *, has_learned: bool = False
) -> str | None:
    """Warnings if no response of a rollout batch provides a useful gradient.

    has_learned: earlier batches had advantages, so that the policy may have collapsed.
    """
    responses = [rollout.response for rollout in batch.rollouts]
    messages = []
    if all(response.finish_reason == "length" for response in responses):
        messages.append(
            f"every response was cut at rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}, so none came to its end: raise it, or see in "
            "rollouts/ whether the model ever writes the end token of its generation_config.json"
        )
    choice = config.objective.choice
    if not batch.learns.any() and not distills_alone(choice):
        terms = isinstance(choice, ObjectiveSpec) and (choice.kl or choice.entropy_coefficient)
        what_learns = "only objective.kl and the entropy are" if terms else "nothing is"
        reward = batch.rollouts[0].grade_result.reward
        if all(rollout.grade_result.reward == reward for rollout in batch.rollouts):
            what = f"every response got the same reward, {reward:g}"
        else:
            what = "within each group all responses got the same reward"
        reasons = Counter(rollout.grade_result.reason for rollout in batch.rollouts)
        reason, count = reasons.most_common(1)[0]
        messages.append(
            f"{what}, so no advantage differs from 0 and {what_learns} learned "
            f"({count} of {len(responses)} graded as {reason!r}): see rollouts/ for the responses, "
            "check reward.verifier and the answers of data.train on them, and use prompts that the "
            "model solves sometimes"
        )
        if has_learned:
            messages[-1] += (
                "; if the reward rose before, compare pass@k and policy/entropy, because a policy "
                "that has collapsed onto one answer needs a lower optimizer.learning_rate"
            )
    return "warning: " + "; ".join(messages) if messages else None


def describe_reward_size(batch: RolloutBatch) -> str | None:
    """Warning if a reward is far outside of [-1, 1]."""
    largest = max((rollout.grade_result.reward for rollout in batch.rollouts), key=abs)
    if abs(largest) <= UNUSUAL_REWARD:
        return None
    return (
        f"warning: the verifier returned a reward of {largest:g}, and rewards are usually between "
        "-1 and 1: scores are printed as percentages of a reward of 1, and one such response "
        "decides its group's advantages; return 1 for a right answer, or divide by the largest "
        "possible reward"
    )


def describe_partial_reward(metrics: Mapping[str, float], batch: RolloutBatch) -> str | None:
    """Warning if rewards of the first step are above 0 and none reaches 1."""
    best = max(rollout.grade_result.reward for rollout in batch.rollouts)
    if metrics["step"] != 1 or not 0 < best < 1:
        return None
    return (
        f"warning: the largest of {len(batch.rollouts)} rewards is {best:g}, and a response counts "
        "as right where its reward is at least 1: unless some reach 1 later, pass@k stays 0 and "
        "the report marks every response as wrong; return 1 for a right answer (training and avg@k "
        "are not affected)"
    )


def describe_tolerances(metrics: Mapping[str, float], config: Config) -> str | None:
    """Warning if the constraint rejects most tokens, or none, with tolerances to try.

    Tightness is checked in the policy's first step, width in its first step at the full learning
    rate: a policy that hardly moves has no tokens to reject.
    """
    choice = config.objective.choice
    if not isinstance(choice, ObjectiveSpec) or not isinstance(choice.constraint, Bounds):
        return None
    step, acceptance = metrics["step"], metrics.get("gate/acceptance", math.nan)
    is_mean = choice.weight in ("prefix_mean", "sequence_mean")
    first = config.first_policy_step
    full_rate = first + int(config.optimizer.warmup_steps)
    if step == first and acceptance < TOO_TIGHT:
        what = f"rejected {1 - acceptance:.0%} of the tokens in the first step"
        after = "; a tight constraint slows the policy down, so check again after the change"
    elif step == full_rate and acceptance > TOO_WIDE and is_mean and config.updates_per_step > 1:
        what, after = f"left {acceptance:.2%} of the tokens of step {step:.0f} unchanged", ""
    else:
        return None
    now = ", ".join(f"{side} {getattr(choice.constraint, side)}" for side in ("low", "high"))
    last = f"epoch_{config.trainer.epochs}/by_fraction/1.0/prefix_mean_log_std"
    length, spread = metrics["response/length_mean"], metrics.get(last, math.nan)
    better = suggest_tolerances(choice, spread=spread, length=length)
    seen = (
        f"warning: the constraint of {config.objective.name} ({now}) {what} (gate/acceptance "
        f"{acceptance:.3f}, usually 0.7 to 0.999): "
    )
    if better is None:
        return f"{seen}lower optimizer.learning_rate or trainer.epochs, or see {SECTION}"
    values = ", ".join(f"{side}: {value:g}" for side, value in better.items())
    effect = "would keep three quarters or more of the last tokens"
    if spread > WIDEST:
        effect = "is the widest to try; lower optimizer.learning_rate or trainer.epochs too"
    return (
        f"{seen}tolerances belong to a response length and a learning rate. log w has a spread of "
        f"{spread:.2g} between these responses of {length:.0f} tokens, so "
        f"objective.constraint='{{{values}}}' {effect}{after} ({SECTION})"
    )
