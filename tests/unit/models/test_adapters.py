"""Folders of the peft library: what does not fit is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.adapters import check_peft_folder, factor_name, list_linears, write_base
from megatron_rl.models.shape import read_model_shape
from tests.unit.models.test_architectures import _config

RANK = 2
TARGETS = ("qkv", "proj", "fc1", "fc2")


def make_folder(folder, shape, *, rank, shared, targets=TARGETS, **about):
    """Write random adapters; shared: modules of one linear have one A."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for linear in list_linears(shape, targets):
        a = torch.randn(rank, linear.inputs, generator=generator)
        for module, outputs in zip(linear.modules, linear.outputs, strict=True):
            if not shared:
                a = torch.randn(rank, linear.inputs, generator=generator)
            tensors[factor_name(module, "lora_A")] = a.clone()
            tensors[factor_name(module, "lora_B")] = torch.randn(outputs, rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | about
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture
def model(tmp_path):
    _config("Qwen2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def check(folder, model, **changes):
    chosen = {"rank": RANK, "alpha": 2.0 * RANK, "targets": TARGETS} | changes
    check_peft_folder(folder, model=model, shape=read_model_shape(model), **chosen)


def make(model, **options):
    folder = model.parent / "adapter"
    options = {"rank": RANK, "shared": True} | options
    make_folder(folder, read_model_shape(model), **options)
    return folder


def test_rank_and_alpha_must_give_the_folders_scale(model):
    folder = make(model)
    check(folder, model)
    check(folder, model, rank=3 * RANK, alpha=6.0 * RANK)
    for rank, alpha in ((RANK, 2.0), (1, 2.0), (2 * RANK, 2.0 * RANK)):
        with pytest.raises(ValueError, match=r"set lora.rank to 2 and lora.alpha to 4"):
            check(folder, model, rank=rank, alpha=alpha)


def test_modules_with_an_a_each_need_a_multiple_of_the_rank(model):
    folder = make(model, shared=False)
    with pytest.raises(ValueError, match=r"have 3 different A.*lora.rank to 6 and lora.alpha to 1"):
        check(folder, model)
    check(folder, model, rank=6, alpha=12.0)


def test_targets_and_shapes_are_named(model):
    folder = make(model, targets=("qkv", "fc2"))
    check(folder, model, targets=("qkv", "fc2"))
    with pytest.raises(ValueError, match=r"o_proj.lora_A.weight is missing.*set lora.targets"):
        check(folder, model, targets=("qkv", "fc2", "proj"))
    with pytest.raises(ValueError, match=r"down_proj.lora_A.weight is not expected"):
        check(folder, model, targets=("qkv",))
    _config("Qwen2", hidden_size=16).save_pretrained(model)
    with pytest.raises(ValueError, match=r"has shape \[2, 32\] instead of \[2, 16\]"):
        check(folder, model, targets=("qkv", "fc2"))


@pytest.mark.parametrize(
    "about",
    [{"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"},
     {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 4}},
     {"fan_in_fan_out": True}, {"layers_to_transform": 0},
     {"a_setting_of_tomorrow": 1}],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(model, about):
    folder = make(model, **about)
    with pytest.raises(ValueError, match=f"has {next(iter(about))}=.*merge it"):
        check(folder, model)


@pytest.mark.parametrize("start", ["pissa_niter_16", "lora_ga"])
def test_starts_that_change_the_models_weights_are_refused_by_name(model, start):
    folder = make(model, init_lora_weights=start)
    with pytest.raises(ValueError, match=f"init_lora_weights={start},.*weight_conversion"):
        check(folder, model)


def test_settings_that_change_no_function_are_accepted(model):
    # adapter_config.json of a plain LoraConfig, peft 0.21.2.
    about = {
        "task_type": None, "auto_mapping": None, "peft_version": "0.21.2", "revision": None,
        "base_model_name_or_path": "a/b", "inference_mode": True, "target_modules": ["q_proj"],
        "exclude_modules": None, "lora_dropout": 0.1, "fan_in_fan_out": False, "bias": "none",
        "use_rslora": False, "modules_to_save": None, "layers_to_transform": None,
        "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": None,
        "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {},
        "eva_config": None, "corda_config": None, "lora_ga_config": None, "use_dora": False,
        "velora_config": None, "alora_invocation_tokens": None, "use_qalora": False,
        "qalora_group_size": 16, "monteclora_config": None, "layer_replication": None,
        "lora_bias": False, "target_parameters": None, "use_bdlora": None, "arrow_config": None,
        "kasa_config": None, "ensure_weight_tying": False,
    }  # fmt: skip
    for start in (True, False, "gaussian", "eva"):
        folder = make(model, **about, init_lora_weights=start)
        check(folder, model)
        shutil.rmtree(folder)


def test_some_modules_of_a_linear_are_accepted(model):
    folder = make(model, shared=False, targets=("qkv", "fc1"))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    some = {k: v for k, v in tensors.items() if "k_proj" not in k and "up_proj" not in k}
    save_file(some, file)
    check(folder, model, rank=2 * RANK, alpha=4.0 * RANK, targets=("qkv", "fc1"))
    save_file({k: v for k, v in some.items() if "q_proj.lora_B" not in k}, file)
    with pytest.raises(ValueError, match=r"q_proj.lora_B.weight is missing"):
        check(folder, model, rank=2 * RANK, alpha=4.0 * RANK, targets=("qkv", "fc1"))
    save_file({k: v for k, v in some.items() if "layers.1" not in k}, file)
    with pytest.raises(ValueError, match=r"layers.1.*is missing.*set model.path to the model"):
        check(folder, model, rank=2 * RANK, alpha=4.0 * RANK, targets=("qkv", "fc1"))


def test_the_hint_names_targets_that_fit_or_says_that_none_do(model):
    folder = make(model, targets=("qkv", "fc2"))
    with pytest.raises(ValueError, match=r"set lora.targets to \['qkv', 'fc2'\]"):
        check(folder, model)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {factor_name("lm_head", "lora_A"): torch.ones(RANK, 32)}, file)
    with pytest.raises(ValueError, match=r"lm_head cannot have adapters here: merge it"):
        check(folder, model)


def test_another_base_is_refused_by_its_fingerprint(model):
    folder = make(model)
    write_base(folder, model=model)
    check(folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"adapters of another model.*set model.path"):
        check(folder, model)


def test_broken_folders_are_named(model):
    with pytest.raises(ValueError, match=r"has no adapter_config.json"):
        check(model, model)
    folder = make(model, r="two")
    with pytest.raises(ValueError, match="positive r and lora_alpha"):
        check(folder, model)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: v.int() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="has dtype I32"):
        check(folder, model)


def test_experts_have_no_format(tmp_path):
    _config("Qwen3Moe").save_pretrained(tmp_path / "model")
    shape = read_model_shape(tmp_path / "model")
    assert list_linears(shape, ["qkv", "proj"])
    with pytest.raises(ValueError, match="no format for adapters of single experts"):
        list_linears(shape, TARGETS)
