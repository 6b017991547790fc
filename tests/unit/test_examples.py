"""The examples: the paper's numbers, and layouts that their true models can be cut into."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.apps.planning.models import CONFIGS
from megatron_rl.config import load_config
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives import build_objective
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.rollouts.schedule import build_schedule

EXAMPLES = Path(__file__).parents[2] / "examples" / "pnpo"
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
# Of the models' own config.json files; the devices are those that each config's comment names.
MODELS = {
    "r1_distill_1_5b_epochs1": 32, "r1_distill_1_5b_epochs4": 32, "qwen2_5_7b": 32,
    "qwen2_5_32b": 64, "qwen2_5_7b_lora": 1, "qwen2_5_32b_lora": 8, "mistral_7b": 32,
    "qwen3_30b_a3b": 32, "qwen3_235b_a22b": 256, "gemma_3_4b": 16,
    "glm_4_5_air": 64, "moonlight_16b_a3b": 8,
    "gpt_oss_20b": 32, "qwen3_5_35b_a3b": 32, "qwen3_next_80b_a3b": 64,
}  # fmt: skip
R1_DISTILL = QWEN2 | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
SHAPES = {
    "r1_distill_1_5b_epochs1": R1_DISTILL,
    "r1_distill_1_5b_epochs4": R1_DISTILL,
    "qwen2_5_7b": QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    "qwen2_5_32b": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8,
    },
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None,
    },
    "gpt_oss_20b": {
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
        "rope_theta": 150000, "tie_word_embeddings": False, "attention_bias": True,
    },
    "gemma_3_4b": {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "rope_theta": 1e6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "qwen3_30b_a3b": QWEN2 | {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "qwen3_235b_a22b": QWEN2 | {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
}  # fmt: skip

SHAPES["glm_4_5_air"] = CONFIGS["GLM-4.5-Air"]
SHAPES["qwen3_5_35b_a3b"] = CONFIGS["Qwen3.5-35B-A3B"]
SHAPES["qwen3_next_80b_a3b"] = CONFIGS["Qwen3-Next-80B-A3B-Instruct"]
SHAPES["moonlight_16b_a3b"] = CONFIGS["Moonlight-16B-A3B-Instruct"]
SHAPES |= {f"{name}_lora": SHAPES[name] for name in ("qwen2_5_7b", "qwen2_5_32b")}


# Each regime of the tiny task by what distinguishes it from the quickstart.
REGIMES = {
    "one_epoch": {"trainer", "eval", "optimizer"},
    "four_epochs": set(),
    "queue": {"lag"},
    "engine_ranks": {"lag", "parallel"},
    "replay": {"replay"},
    "partial_rollouts": {"behavior", "lag"},
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
        *REGIMES,
    }
    assert file.stem in {*tiny, *MODELS}, "give its true shape here"


@pytest.mark.parametrize("name", MODELS)
def test_true_model_can_be_cut_as_configured(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    shape, config = read_model_shape(tmp_path), load_config(EXAMPLES / f"{name}.yaml")
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
    assert steps * config.updates_per_step == 2400
    assert config.warmup_updates == {1: 40, 4: 160}[epochs]
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-6, 0.1)
    assert (config.rollout.prompts_per_step, config.rollout.responses_per_prompt) == (256, 8)
    assert config.rollout.prompts_per_step // config.trainer.minibatches == 64
    assert (config.rollout.temperature, config.seed) == (1.0, 42)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 15360)
    assert list(config.eval.sets) == ["amc23", "aime24", "aime25"]
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (32, 0.7, 0.9)


def test_regimes_differ_only_in_defining_settings():
    one, four = (load_config(EXAMPLES / f"r1_distill_1_5b_epochs{n}.yaml") for n in (1, 4))
    changed = one.model_dump()
    changed["trainer"] |= {"epochs": 4, "steps": 150}
    changed["eval"]["every"] = 10
    assert changed == four.model_dump()


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
    assert slurm == [".venv-launcher", "launch", plain[2], *nodes, *plain[3:]]


def test_scripts_name_missing_files(checkout):
    assert "LAUNCH=slurm needs CLUSTER=FILE" in started(checkout, SCRIPTS[0], LAUNCH="slurm")
    assert "must be local or slurm" in started(checkout, SCRIPTS[0], LAUNCH="cloud")
    assert "ABLATION=x: must be" in started(checkout, "r1_distill_1_5b_ablations.sh", ABLATION="x")


@pytest.mark.parametrize(
    "script",
    [name for name in SCRIPTS if name.startswith(("qwen", "r1_")) and "ablations" not in name],
)
@pytest.mark.parametrize("name", ["pnpo", "gspo", "grpo"])
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_files_to_read_first_exist(page):
    root = EXAMPLES.parents[1]
    files = re.findall(r"^\| `(\S+\.py)` \|", (root / page).read_text(), re.MULTILINE)
    assert len(files) == 6
    assert not [file for file in files if not (root / "megatron_rl" / file).is_file()]
