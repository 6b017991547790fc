"""Compare our objectives with other implementations on the same random batches.

TRL is imported if it is installed (anywhere on PYTHONPATH). The loss functions of verl, CTPO and
prime-rl are extracted from local copies of `verl/trainer/ppo/core_algos.py` and
`prime_rl/trainer/rl/loss.py`, whose imports would need a full verl or prime-rl:

    python -m research.tools.compare_implementations --verl core_algos.py \
        --prime-rl loss.py

Prints, for each pair, the largest relative difference of the gradients and, if both define the same
loss, of the losses; exits with 1 if one is larger than 1e-6. Differences that
research/docs/objectives.md explains are adjusted before the comparison.
"""

import argparse
import ast
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.vocab_divergence import token_divergences
from megatron_rl.distributed.vocab_parallel import VocabShard
from megatron_rl.objectives import build_objective, policy_loss
from megatron_rl.objectives.values import GaeSettings, compute_targets, value_loss
from megatron_rl.types import Denominators, Divergence, ReferenceHead

OF_VALUES = ("compute_gae_advantage_return", "compute_value_loss")  # verl's, copies of TRL's
TOLERANCE = 1e-6
OF_FLOAT32 = 1e-4  # divergences, which are computed in float32
BATCHES = 5


def make_batch(seed: int, scale: float) -> dict[str, Tensor]:
    """Draw eight responses of 1 to 50 tokens with masked tokens, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (8, 50)
    behavior = -1 - torch.rand(shape, dtype=torch.float64, generator=generator)
    drift = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < lengths) & (torch.rand(shape, generator=generator) < 0.9)
    mask[:, 0] = True
    return {
        "policy_logprobs": behavior + drift,
        "behavior_logprobs": behavior,
        "reference_logprobs": behavior
        + 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator),
        "advantages": torch.randn(shape[0], dtype=torch.float64, generator=generator),
        "response_mask": mask,
    }


def ours(batch: dict[str, Tensor], name: str, **overrides: Any) -> tuple[float, Tensor]:
    """Compute loss and gradient of our objective."""
    policy = batch["policy_logprobs"].clone().requires_grad_()
    loss, _ = policy_loss(build_objective(name, **overrides), **batch | {"policy_logprobs": policy})
    return loss.item(), torch.autograd.grad(loss, policy)[0]


def trl_loss(batch: dict[str, Tensor], **settings: Any) -> tuple[float, Tensor]:
    """Compute loss and gradient of TRL's `GRPOTrainer._compute_loss` for given log-probs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    policy = batch["policy_logprobs"].clone().requires_grad_()
    mask = batch["response_mask"].long()
    rows, columns = mask.shape
    entropy = torch.zeros_like(policy)
    options = {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2,
        "epsilon_high": 0.28, "beta": 0.0, "delta": None, "use_bias_correction_kl": False,
        "off_policy_mask_threshold": None,
    } | settings  # fmt: skip
    trainer = SimpleNamespace(
        **{k: v for k, v in options.items() if k not in ("delta", "use_bias_correction_kl")},
        args=SimpleNamespace(
            delta=options["delta"],
            use_bias_correction_kl=options["use_bias_correction_kl"],
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0,
        use_vllm=False, vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, max_completion_length=columns,
    )  # fmt: skip
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.zeros(rows, 1).long(), "prompt_mask": torch.ones(rows, 1).long(),
            "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
            "advantages": batch["advantages"], "old_per_token_logps": batch["behavior_logprobs"],
            "ref_per_token_logps": batch["reference_logprobs"], "num_items_in_batch": mask.sum(),
        },
    )  # fmt: skip
    return loss.item(), torch.autograd.grad(loss, policy)[0]


class ActorConfig(SimpleNamespace):
    """Replacement for verl's type of the same name in the extracted functions."""

    global_batch_info: dict[str, Any] = {}  # noqa: RUF012 - verl passes it on by keyword

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute or the default."""
        return getattr(self, name, default)


def verl_functions(source: Path) -> dict[str, Any]:
    """Extract the loss functions of a `core_algos.py`, without its imports and decorators."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name in ("agg_loss", *OF_VALUES) or "compute_policy_loss" in node.name)
    ]
    for node in wanted:
        node.decorator_list = []
    masked = SimpleNamespace(
        masked_sum=lambda x, mask: (x * mask).sum(),
        masked_mean=lambda x, mask: (x * mask).sum() / mask.sum(),
        masked_whiten=lambda x, mask: x,  # compared apart: its deviation is that of a sample
        clip_by_value=lambda x, low, high: torch.max(torch.min(x, high), low),
    )
    namespace: dict[str, Any] = {"torch": torch, "verl_F": masked, "ActorConfig": ActorConfig}
    namespace["AlgoConfig"] = type("AlgoConfig", (), {})
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *wanted], [])
    exec(compile(module, str(source), "exec"), namespace)
    return namespace


def verl_loss(
    batch: dict[str, Tensor], function: Any, *, aggregation: str, **settings: Any
) -> tuple[float, Tensor]:
    """Compute loss and gradient of one of verl's loss functions."""
    policy = batch["policy_logprobs"].clone().requires_grad_()
    config = ActorConfig(
        **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | settings
    )
    loss, _ = function(
        old_log_prob=batch["behavior_logprobs"],
        log_prob=policy,
        advantages=batch["advantages"][:, None].expand(policy.shape),
        response_mask=batch["response_mask"].double(),
        loss_agg_mode=aggregation,
        config=config,
    )
    return loss.item(), torch.autograd.grad(loss, policy)[0]


Pair = tuple[str, Any, Any, bool]  # name, ours, theirs, whether the losses are the same number


def trl_pairs() -> list[Pair]:
    """Return the pairs for TRL."""
    no_dual = {"dual": None}
    kl = {"coefficient": 0.04, "estimator": "k3"}
    grpo = {"constraint": no_dual, "aggregation": "response_mean"}
    dr_grpo = {"aggregation": "response_sum", "constant": 50.0}
    sequence = {
        "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4
    }  # fmt: skip
    rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("grpo", "grpo", grpo, {"loss_type": "grpo"}),
        ("dapo / bnpo", "dapo", {}, {"loss_type": "dapo"}),
        ("dr_grpo", "dapo", dr_grpo, {"loss_type": "dr_grpo"}),
        ("gspo (sequence level)", "gspo", {}, sequence),
        ("cispo", "cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("grpo + KL with use_bias_correction_kl", "grpo", grpo | {"kl": kl},
         {"beta": 0.04, "use_bias_correction_kl": True}),
        ("sapo", "sapo", {}, {"loss_type": "sapo"}),
        ("vespo", "vespo", {}, {"loss_type": "vespo"}),
        ("grpo with off_policy_mask_threshold", "opsm", {},
         {"off_policy_mask_threshold": 1e-4, "epsilon_high": 0.2}),
    ]  # fmt: skip
    return [
        (f"TRL {what}", partial(ours, name=name, **options), partial(trl_loss, **settings), True)
        for what, name, options, settings in rows
    ]


def trl_divergence(
    name: str, hidden: Tensor, weight: Tensor, teacher: ReferenceHead, mask: Tensor, *, gkd: bool
) -> Tensor:
    """Compute the loss of TRL's DistillationTrainer, or of its GKDTrainer from materialized logits.

    hidden [B, T, h], weight [V, h], mask [B, T].
    """
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[name]
    if gkd:
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

        return GKDTrainer.generalized_jsd_loss(
            (hidden @ weight.T).double(),
            (teacher.hidden @ teacher.weight.T).double(),
            labels=torch.where(mask, 0, -100),
            beta=beta,
            temperature=0.7,
            num_items_in_batch=int(mask.sum()),
        )
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    return _chunked_divergence_loss(
        hidden, teacher.hidden, weight, teacher.weight, mask.long(), beta, temperature=0.7
    )[0]


def compare_divergences(name: Divergence, *, gkd: bool) -> float:
    """Print and return the largest relative difference of divergences on the same tokens.

    The teacher is twice as wide as the student; gradients are of hidden states and output weight.
    """
    worst = 0.0
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        for scale in (0.1, 1.0):
            mask = make_batch(seed, scale)["response_mask"]
            hidden, weight, theirs, head = (
                scale * torch.randn(size, generator=generator)
                for size in ((*mask.shape, 16), (97, 16), (*mask.shape, 32), (97, 32))
            )
            teacher, results = ReferenceHead(theirs, head), []
            for is_ours in (True, False):
                leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
                if is_ours:
                    loss = token_divergences(
                        leaves[0][mask], leaves[1], ReferenceHead(theirs[mask], head),
                        divergence=name, shard=VocabShard(0, 97), temperature=0.7,
                    ).mean()  # fmt: skip
                else:
                    loss = trl_divergence(name, *leaves, teacher, mask, gkd=gkd)
                results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
            for own, other in zip(*results, strict=True):
                worst = max(worst, float((own - other).norm() / other.norm()))
    trainer = "GKDTrainer" if gkd else "DistillationTrainer"
    print(f"TRL {trainer}, {name}: loss and gradients {worst:.1e}")
    return worst


def verl_pairs(functions: dict[str, Any]) -> list[Pair]:
    """Return the pairs for the functions of verl, and of CTPO if the file contains them."""
    mean, tokens, gradient = "seq-mean-token-mean", "token-mean", ", gradient only"
    tv, kl = (
        {"clip_ratio_low": x, "clip_ratio_high": x, "clip_ratio_c": 1e4} for x in (0.15, 0.05)
    )
    rows: list[tuple[str, str, str, str, dict[str, float]]] = [
        ("verl vanilla, dual clip 10", "grpo", "vanilla", tokens, {"clip_ratio_c": 10.0}),
        ("verl gspo", "gspo", "gspo", mean, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        ("verl cispo", "cispo", "cispo", tokens, {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
        (f"verl dppo_tv{gradient}", "dppo_tv", "dppo_tv", tokens, tv),
        (f"verl dppo_kl{gradient}", "dppo_kl", "dppo_kl", tokens, kl),
        ("verl sapo", "sapo", "sapo", mean, {"tau_pos": 1.0, "tau_neg": 1.05}),
    ]
    for name, kind, power in (("ctpo", "cumprod", 0.5), ("ctpo_geomean", "geomean", -0.5)):
        function = f"cum_token_{kind}_la"
        if f"compute_policy_loss_{function}" in functions:
            settings = {"clip_ratio_la_power": power}
            rows.append((f"CTPO {function}{gradient}", name, function, mean, settings))
    return [
        (
            what,
            partial(ours, name=name),
            partial(
                verl_loss,
                function=functions[f"compute_policy_loss_{function}"],
                aggregation=aggregation,
                **settings,
            ),
            not what.endswith(gradient),
        )
        for what, name, function, aggregation, settings in rows
    ]


def compare_values(functions: dict[str, Any]) -> float:
    """Print and return the largest relative difference of GAE, returns and the value loss.

    verl's responses have observed tokens within, which both pass; its rewards are on the decisions.
    """
    worst: dict[str, float] = defaultdict(float)
    for seed in range(BATCHES):
        batch = make_batch(seed, 0.5)
        mask, generator = batch["response_mask"], torch.Generator().manual_seed(seed)
        rewards, values, moved = (
            torch.randn(mask.shape, dtype=torch.float64, generator=generator) * mask
            for _ in range(3)
        )
        advantages, returns = functions["compute_gae_advantage_return"](
            rewards, values, mask.double(), gamma=0.97, lam=0.9
        )
        predicted = (values + 0.3 * moved).requires_grad_()
        loss, _ = functions["compute_value_loss"](
            predicted, returns, values, mask.double(), cliprange_value=0.2
        )
        theirs = [advantages[mask], returns[mask], loss, torch.autograd.grad(loss, predicted)[0]]
        layout = SequenceLayout((mask.shape[1],) * len(mask), mask.flatten())
        own = compute_targets(
            layout, values.flatten(), rewards.flatten(), ends=layout.mask,
            cut=torch.zeros(mask.numel(), dtype=bool),
            settings=GaeSettings(gamma=0.97, gae_lambda=0.9, target_lambda=0.9),
        )  # fmt: skip
        leaf = predicted.detach().clone().requires_grad_()
        sizes = Denominators(float(len(mask)), float(mask.sum()))
        losses, _ = value_loss(
            leaf.flatten(), values.flatten(), own.returns, clip=0.2, layout=layout,
            denominators=sizes,
        )  # fmt: skip
        ours = [own.advantages, own.returns]
        ours = [one.view(mask.shape)[mask] for one in ours]
        ours += [losses.sum(), torch.autograd.grad(losses.sum(), leaf)[0]]
        names = ("advantages", "returns", "value loss", "its gradient")
        for name, a, b in zip(names, ours, theirs, strict=True):
            gap = (a.detach() - b.detach()).norm() / b.detach().norm()
            worst[name] = max(worst[name], float(gap))
    print("verl critic: " + ", ".join(f"{name} {gap:.1e}" for name, gap in worst.items()))
    return max(worst.values())


def prime_rl_pair(source: Path) -> Pair:
    """Extract prime-rl's default loss from its `loss.py`, without the squared log-ratio."""
    names = ("compute_importance_ratio_and_mismatch_kl", "default_loss_fn", "_safe_mean")
    wanted = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    namespace: dict[str, Any] = {"torch": torch, "LossOutputs": SimpleNamespace}
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *wanted], [])
    exec(compile(module, str(source), "exec"), namespace)

    def theirs(batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        policy = batch["policy_logprobs"].clone().requires_grad_()
        inputs = SimpleNamespace(
            trainer_logprobs=policy,
            inference_logprobs=batch["behavior_logprobs"],
            advantages=batch["advantages"][:, None].expand(policy.shape),
            loss_mask=batch["response_mask"],
            loss_weights=None,
        )
        config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=0.0)
        loss = namespace["default_loss_fn"](inputs, config).loss / batch["response_mask"].sum()
        return loss.item(), torch.autograd.grad(loss, policy)[0]

    bounds = {"constraint": {"low": 0.2, "high": 0.2}}
    return "prime-rl default loss", lambda b: ours(b, "dppo_tv", **bounds), theirs, True


def compare(what: str, left: Any, right: Any, same_loss: bool) -> float:
    """Print and return the largest relative difference over several batches."""
    worst_gradient = worst_loss = 0.0
    for seed in range(BATCHES):
        for scale in (1e-3, 3e-2, 0.5):
            batch = make_batch(seed, scale)
            loss, gradient = left(batch)
            other_loss, other = right(batch)
            worst_gradient = max(worst_gradient, float((gradient - other).norm() / other.norm()))
            worst_loss = max(worst_loss, abs(loss - other_loss) / abs(other_loss))
    loss_text = f"{worst_loss:.1e}" if same_loss else "not the same number"
    print(f"{what}: gradient {worst_gradient:.1e}, loss {loss_text}")
    return max(worst_gradient, worst_loss if same_loss else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", type=Path, help="A copy of verl/trainer/ppo/core_algos.py.")
    parser.add_argument("--prime-rl", type=Path, help="A copy of prime_rl/trainer/rl/loss.py.")
    arguments = parser.parse_args()
    pairs, of_divergences, of_values = [], 0.0, 0.0
    try:
        import trl

        print(f"TRL {trl.__version__}")
        pairs += trl_pairs()
        of_divergences = max(
            compare_divergences(name, gkd=gkd)
            for name in get_args(Divergence)
            for gkd in (False, True)
        )
    except ImportError as missing:
        print(f"TRL cannot be imported ({missing}): skipped")
    if arguments.verl:
        functions = verl_functions(arguments.verl)
        pairs += verl_pairs(functions)
        of_values = compare_values(functions)
    if arguments.prime_rl:
        pairs.append(prime_rl_pair(arguments.prime_rl))
    if not pairs:
        sys.exit("nothing to compare with: install trl or give --verl or --prime-rl")
    worst = max(compare(*pair) for pair in pairs)
    sys.exit(worst > TOLERANCE or max(of_divergences, of_values) > OF_FLOAT32)


if __name__ == "__main__":
    main()
