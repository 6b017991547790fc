"""The examples: the paper's numbers, and layouts that their true models can be cut into."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.apps.planning import models as planned
from megatron_rl.apps.planning.models import write_config_json
from megatron_rl.config import load_config
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives import build_objective
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.rollouts.schedule import build_schedule

EXAMPLES = Path(__file__).parents[2] / "examples" / "pnpo"
# The devices are those that each config's comment names; the models are the planner's.
MODELS = {
    "r1_distill_1_5b_epochs1": 32, "r1_distill_1_5b_epochs4": 32, "qwen2_5_7b": 32,
    "qwen2_5_32b": 64, "qwen2_5_7b_lora": 1, "qwen2_5_32b_lora": 8, "mistral_7b": 32,
    "qwen3_30b_a3b": 32, "qwen3_235b_a22b": 256, "gemma_3_4b": 16,
    "glm_4_5_air": 64, "moonlight_16b_a3b": 8,
    "gpt_oss_20b": 32, "qwen3_5_35b_a3b": 32, "qwen3_next_80b_a3b": 64,
}  # fmt: skip
TRUE_MODELS = {
    "r1_distill_1_5b_epochs1": "DeepSeek-R1-Distill-Qwen-1.5B",
    "r1_distill_1_5b_epochs4": "DeepSeek-R1-Distill-Qwen-1.5B",
    "qwen2_5_7b": "Qwen2.5-7B", "qwen2_5_32b": "Qwen2.5-32B", "qwen2_5_7b_lora": "Qwen2.5-7B",
    "qwen2_5_32b_lora": "Qwen2.5-32B", "mistral_7b": "Mistral-7B-Instruct-v0.3",
    "qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "gemma_3_4b": "Gemma-3-4B-it-text", "glm_4_5_air": "GLM-4.5-Air",
    "moonlight_16b_a3b": "Moonlight-16B-A3B-Instruct", "gpt_oss_20b": "gpt-oss-20b-bf16",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B", "qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B-Instruct",
}  # fmt: skip


def save_true_model(folder, name, **changes):
    """Create the folder of an example's model with only its config.json; return the folder."""
    file = write_config_json(planned.MODELS[TRUE_MODELS[name]], folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


# Each regime of the tiny task by what distinguishes it from the quickstart.
REGIMES = {
    "one_epoch": {"trainer", "eval", "optimizer"},
    "four_epochs": set(),
    "queue": {"lag"},
    "engine_ranks": {"lag", "parallel"},
    "replay": {"replay"},
    "partial_rollouts": {"behavior", "lag"},
    "critic": {"critic", "rollout", "objective"},
}


@pytest.mark.parametrize("name", REGIMES)
def test_regime_differs_from_quickstart_only_in_defining_settings(name):
    quickstart, regime = (load_config(EXAMPLES / f"{one}.yaml") for one in ("quickstart", name))
    one, other = quickstart.model_dump(), regime.model_dump()
    assert {key for key in one if one[key] != other[key]} == REGIMES[name]
    updates = regime.trainer.steps * regime.updates_per_step
    assert updates == quickstart.trainer.steps * quickstart.updates_per_step == 256
    assert build_schedule(regime).steps == regime.trainer.steps
    build_objective(regime.objective.name, **regime.objective.overrides)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_is_valid(file):
    load_config(file)
    tiny = {
        "quickstart",
        "own_data",
        "from_verl",
        "from_trl",
        "dapo",
        "offline",
        "sft",
        "tools",
        "ask",
        "real_model",
        *REGIMES,
    }
    assert file.stem in {*tiny, *MODELS}, "give its true shape here"


@pytest.mark.parametrize("name", MODELS)
def test_true_model_can_be_cut_as_configured(tmp_path, name):
    shape, config = (
        read_model_shape(save_true_model(tmp_path, name)),
        load_config(EXAMPLES / f"{name}.yaml"),
    )
    assert not layout_problems(config, shape, MODELS[name])
    build_objective(config.objective.name, **config.objective.overrides)
    assert config.max_model_tokens == min(1024 + 15360, shape.max_position_embeddings)
    assert config.trainer.tokens_per_micro_batch >= config.max_model_tokens


@pytest.mark.parametrize(("epochs", "steps", "every"), [(1, 600, 50), (4, 150, 10)])
def test_settings_of_paper(epochs, steps, every):
    """Appendix C and section 5.1 of the paper."""
    config = load_config(EXAMPLES / f"r1_distill_1_5b_epochs{epochs}.yaml")
    assert (config.trainer.steps, config.trainer.epochs, config.eval.every) == (
        steps,
        epochs,
        every,
    )
    changed = load_config(EXAMPLES / "r1_distill_1_5b_epochs1.yaml").model_dump()
    changed["trainer"] |= {"epochs": epochs, "steps": steps}
    changed["eval"]["every"] = every
    assert changed == config.model_dump()
    assert steps * config.updates_per_step == 2400
    assert config.warmup_updates == {1: 40, 4: 160}[epochs]
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-6, 0.1)
    assert (config.rollout.prompts_per_step, config.rollout.responses_per_prompt) == (256, 8)
    assert config.rollout.prompts_per_step // config.trainer.minibatches == 64
    assert (config.rollout.temperature, config.seed) == (1.0, 42)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 15360)
    assert list(config.eval.sets) == ["amc23", "aime24", "aime25"]
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (32, 0.7, 0.9)


SCRIPTS = sorted(file.name for file in EXAMPLES.glob("*.sh") if file.name != "launch.sh")
ABLATIONS = ("no_gate", "one_sided", "constant_gate", "token_mean", "local_weight", "path_gradient")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The scripts in a checkout whose environments are stand-ins that print their arguments."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(EXAMPLES, root / "examples" / "pnpo")
    (root / "tools").mkdir()
    (root / "tools" / "setup_env.sh").touch()
    for venv in (".venv", ".venv-launcher"):
        (root / venv / "bin").mkdir(parents=True)
        for program in ("megatron-rl", "python"):
            file = root / venv / "bin" / program
            file.write_text(f'#!/bin/sh\n[ {program} = python ] || printf "%s\\n" {venv} "$@"\n')
            file.chmod(0o755)
    return root


def started(checkout, script, *arguments, **variables):
    """The command that a script starts, and its arguments."""
    done = subprocess.run(
        ["bash", str(checkout / "examples" / "pnpo" / script), *arguments],
        env={"PATH": os.environ["PATH"], **variables}, cwd="/", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout.splitlines() if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs_three_ways(checkout, script):
    extra = {"ABLATION": "no_gate"} if "ablations" in script else {}
    venv, *plain = started(checkout, script, "seed=7", **extra)
    if plain[0] == "quickstart":  # the command of the package, which has its config
        plain[:1] = ["train", "--config", "examples/pnpo/quickstart.yaml"]
    assert (venv, plain[:2], plain[-1]) == (".venv", ["train", "--config"], "seed=7")
    config = load_config(EXAMPLES.parents[1] / plain[2], plain[3:])
    assert config.seed == 7
    local = started(checkout, script, "seed=7", LAUNCH="local", **extra)
    clusters = ["--cluster", "examples/pnpo/clusters/local.yaml"]
    assert local == [".venv-launcher", "launch", plain[2], *clusters, *plain[3:]]
    slurm = started(
        checkout, script, "seed=7", LAUNCH="slurm", CLUSTER="c.yaml", NODES="4", **extra
    )
    nodes = ["--cluster", "c.yaml", "--nodes", "4"]
    # That of this machine's processor, in one script.
    settings = [setting for setting in plain[3:] if setting != "trainer.dtype=float32"]
    assert slurm == [".venv-launcher", "launch", plain[2], *nodes, *settings]


def test_scripts_name_missing_files(checkout):
    assert "LAUNCH=slurm needs CLUSTER=FILE" in started(checkout, SCRIPTS[0], LAUNCH="slurm")
    assert "must be local or slurm" in started(checkout, SCRIPTS[0], LAUNCH="cloud")
    assert "ABLATION=x: must be" in started(checkout, "r1_distill_1_5b_ablations.sh", ABLATION="x")


@pytest.mark.parametrize(
    "script",
    [name for name in SCRIPTS if name.startswith(("qwen", "r1_")) and "ablations" not in name],
)
@pytest.mark.parametrize("name", ["pnpo", "gspo"])
def test_script_variable_selects_objective_with_tolerances_of_paper(checkout, script, name):
    _, _, _, file, *overrides = started(checkout, script, OBJECTIVE=name)
    objective = load_config(EXAMPLES.parents[1] / file, overrides).objective
    assert (objective.name, objective.overrides) == (name, {})  # the named one, unchanged


def test_each_ablation_changes_one_part(checkout):
    whole = build_objective("pnpo")
    changed = set()
    for ablation in ABLATIONS:
        script = "r1_distill_1_5b_ablations.sh"
        _, _, _, file, *overrides = started(checkout, script, ABLATION=ablation)
        objective = load_config(EXAMPLES.parents[1] / file, overrides).objective
        spec = build_objective(objective.name, **objective.overrides).spec
        parts = [part for part in vars(spec) if getattr(spec, part) != getattr(whole.spec, part)]
        assert len(parts) == 1, (ablation, parts)
        changed.add((parts[0], str(getattr(spec, parts[0]))))
    assert len(changed) == len(ABLATIONS)


def test_files_to_read_first_exist():
    root = EXAMPLES.parents[1]
    files = re.findall(r"^\| `(\S+\.py)` \|", (root / "README.md").read_text(), re.MULTILINE)
    assert len(files) == 6
    assert not [file for file in files if not (root / "megatron_rl" / file).is_file()]
