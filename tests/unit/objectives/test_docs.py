"""The code of docs/use-in-your-trainer.md and its examples runs and gives policy_loss's numbers.

verl and TRL are not installed here: their names in these snippets are replaced by the two things
that the snippets use of them, a registry and a base class.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_rl.objectives import OBJECTIVE_NAMES, build_objective, policy_loss

PAGE = Path(__file__).parents[3] / "docs" / "use-in-your-trainer.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
EXAMPLES = PAGE.parents[1] / "examples" / "trainers"


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    behavior = -1 - torch.rand(4, 9, generator=generator)
    return {
        "policy_logprobs": behavior + 1e-3 * torch.randn(4, 9, generator=generator),
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "response_mask": torch.rand(4, 9, generator=generator) < 0.8,
    }


def execute(snippet, monkeypatch, **modules):
    for name, content in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(content)
    namespace = {}
    exec(snippet, namespace)
    return namespace


def test_plain_call_of_page(batch, monkeypatch):
    names = dict(batch, policy_logprobs=batch["policy_logprobs"].requires_grad_())
    exec(SNIPPETS[0], names)
    assert names["loss"] == policy_loss("pnpo", **batch)[0]
    assert names["metrics"]["gate/acceptance"] <= 1


def test_verl_registration_of_page(batch, monkeypatch):
    registry = {}

    def register_policy_loss(name):
        return lambda function: registry.setdefault(name, function)

    execute(
        (EXAMPLES / "verl_loss.py").read_text(),
        monkeypatch,
        verl__trainer__ppo__core_algos={"register_policy_loss": register_policy_loss},
    )
    wanted, _ = policy_loss("pnpo", **batch)
    mask = batch["response_mask"]
    sizes = {"dp_size": 2, "global_batch_size": 8, "batch_num_tokens": 2 * int(mask.sum())}
    given = {
        "old_log_prob": batch["behavior_logprobs"],
        "log_prob": batch["policy_logprobs"],
        "advantages": batch["advantages"][:, None].expand(4, 9),
        "response_mask": mask.float(),
    }
    # Four of the eight responses of a mini-batch, on one of two ranks whose gradients are averaged.
    loss, metrics = registry["megatron_rl_pnpo"](
        **given, config=SimpleNamespace(global_batch_info=sizes)
    )
    assert loss.item() == pytest.approx(wanted.item() * 2 * 4 / 8, rel=1e-6)
    assert "actor/gate/acceptance" in metrics
    # verl wants the same names from every part on every rank: here one without any advantage.
    _, others = registry["megatron_rl_pnpo"](
        **given | {"advantages": torch.zeros(4, 9), "response_mask": mask.float() * 0},
        config=SimpleNamespace(global_batch_info=sizes),
    )
    assert others.keys() == metrics.keys()
    with pytest.raises(ValueError, match="rollout_is"):
        registry["megatron_rl_pnpo"](
            **given, config=SimpleNamespace(global_batch_info=sizes), rollout_is_weights=mask
        )
    with pytest.raises(ValueError, match="batch_num_tokens"):
        registry["megatron_rl_pnpo"](**given, config=SimpleNamespace(global_batch_info={}))


def test_trl_trainer_of_page(batch, monkeypatch):
    trainer = execute(
        (EXAMPLES / "trl_trainer.py").read_text(), monkeypatch, trl={"GRPOTrainer": object}
    )["PNPOTrainer"]

    def loss_of(rows, *, objective, parts=1, processes=1, steps_per_generation=1):
        given = SimpleNamespace(
            objective=objective,
            _get_per_token_logps_and_entropies=lambda *_: (batch["policy_logprobs"][rows], None),
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=parts,
            args=SimpleNamespace(steps_per_generation=steps_per_generation),
            accelerator=SimpleNamespace(num_processes=processes),
            _metrics={"train": defaultdict(list)},
        )
        mask = batch["response_mask"]
        inputs = {
            "prompt_ids": torch.zeros(4, 2).long()[rows],
            "prompt_mask": torch.ones(4, 2).long()[rows],
            "completion_ids": torch.zeros(4, 9).long()[rows],
            "completion_mask": mask.long()[rows],
            "advantages": batch["advantages"][rows],
            "old_per_token_logps": batch["behavior_logprobs"][rows],
            "num_items_in_batch": mask.sum(),  # of the generation batch, on all processes
        }
        loss = trainer._compute_loss(given, None, inputs)
        assert len(given._metrics["train"]["gate/acceptance"]) == 1
        return loss.item()

    for name in ("pnpo", "dapo"):  # a response mean and a token mean
        wanted = policy_loss(name, **batch)[0].item()
        objective = build_objective(name)
        assert loss_of(slice(0, 4), objective=objective) == pytest.approx(wanted, rel=1e-6)
        halves = (slice(0, 2), slice(2, 4))
        # Two accumulated parts are added; two processes are averaged.
        added = [loss_of(h, objective=objective, parts=2, steps_per_generation=2) for h in halves]
        assert sum(added) == pytest.approx(wanted, rel=1e-6)
        averaged = [loss_of(h, objective=objective, processes=2) for h in halves]
        assert sum(averaged) / 2 == pytest.approx(wanted, rel=1e-6)


def test_every_objective_is_in_table():
    table = PAGE.with_name("objectives.md").read_text()
    for name in OBJECTIVE_NAMES:
        assert f"\n| `{name}` |" in table, f"docs/objectives.md has no row for {name}"
