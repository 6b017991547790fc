"""The big examples fit their devices at true shape; what does not fit is told how it would."""

import pytest

from megatron_rl.config import ConfigError, load_config, parse_config
from megatron_rl.planning import fit
from megatron_rl.preflight.memory import check_memory
from tests.unit.planning.models import SMALL, save_shape
from tests.unit.test_examples import EXAMPLES, MODELS, SHAPES

DEVICE = 80 * 10**9  # less than any device of that name has
SHALLOW_DEVICE = 27 * 2**30
PAPER = SHAPES["r1_distill_1_5b_epochs4"]


def example(tmp_path, name):
    """An example's config, its model's folder with nothing but config.json."""
    config = load_config(EXAMPLES / f"{name}.yaml")
    return fit.apply_changes(config, {"model.path": str(save_shape(tmp_path, SHAPES[name]))})


def defaults(tmp_path, **sections):
    """Nothing but the paper's model: every default as it is."""
    path = save_shape(tmp_path, PAPER)
    return parse_config({"model": {"path": str(path)}, "data": {"train": "none.jsonl"}, **sections})


def shallow(tmp_path, **sections):
    """The same with two of its layers, which a device of 27 GiB holds."""
    config = defaults(tmp_path, **sections)
    save_shape(tmp_path, PAPER | {"num_hidden_layers": 2})
    return config


# One epoch is trained in the layout of four.
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"r1_distill_1_5b_epochs1"}))
def test_a_big_example_fits(tmp_path, name):
    made = fit.check_fit(example(tmp_path, name), processes=MODELS[name], device_bytes=DEVICE)
    assert sum(made[0].states.values()) > 2**30  # its true shape
    # Beside weights an actor asleep keeps Megatron's buffer for gathered activations alone.
    assert made[0].asleep.get("activations", 0) < 0.2 * 2**30


def test_the_defaults_fit_the_papers_model_on_one_device(tmp_path):
    (made,) = fit.check_fit(defaults(tmp_path), processes=1, device_bytes=DEVICE)
    # bfloat16 weights, float32 gradients, float32 main weights and two moments
    held = {"weights": 2, "gradients": 4, "optimizer": 12}
    assert made.parameters == 1_777_088_000
    for name, width in held.items():
        assert made.states[name] == pytest.approx(width * made.parameters, rel=1e-3)


def test_what_does_not_fit_names_settings_that_do(tmp_path):
    config = shallow(tmp_path, trainer={"tokens_per_micro_batch": 65536})
    with pytest.raises(fit.DoesNotFitError) as error:
        fit.check_fit(config, processes=1, device_bytes=SHALLOW_DEVICE)
    said = str(error.value)
    assert "training needs" in said
    assert "the actor's peak, update" in said
    cures = said.split("what fits: ")[1].split(", or ")
    assert cures[0] == "trainer.tokens_per_micro_batch=16384"
    for cure in cures:
        changes = dict(change.split("=") for change in cure.split())
        values = {k: int(v) if v.isdigit() else v for k, v in changes.items()}
        assert fit.check_fit(fit.apply_changes(config, values), processes=1, device_bytes=DEVICE)


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        # 27 GiB - 6 reserve - 1 of the actor are 74% of the device.
        (0.95, r"generating needs .*; what fits: rollout.memory_fraction=0.7, or"),
        # 1 GiB of weights; 2 layers x 2 x 2 heads x 128 x 16,384 tokens x 2 bytes are 0.03.
        (0.03, r"the engine's share needs 1.1 of 0.8 GiB .* fits: rollout.memory_fraction=0.1, or"),
    ],
)
def test_an_engine_of_a_wrong_share_is_told_a_right_one(tmp_path, fraction, said):
    config = shallow(tmp_path, rollout={"memory_fraction": fraction})
    with pytest.raises(fit.DoesNotFitError, match=said):
        fit.check_fit(config, processes=1, device_bytes=SHALLOW_DEVICE)


def test_two_lacks_are_cured_together(tmp_path):
    config = shallow(
        tmp_path, rollout={"memory_fraction": 0.95}, trainer={"tokens_per_micro_batch": 65536}
    )
    with pytest.raises(fit.DoesNotFitError) as error:
        fit.check_fit(config, processes=1, device_bytes=SHALLOW_DEVICE)
    cure = str(error.value).split("what fits: ")[1].split(", or ")[0]
    assert cure == "rollout.memory_fraction=0.7 trainer.tokens_per_micro_batch=16384"


def test_preflight_refuses_in_a_process_of_its_own(tmp_path, monkeypatch):
    path = save_shape(tmp_path / "small", PAPER | SMALL)
    values = {"model": {"path": str(path)}, "data": {"train": "none.jsonl"}}
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"does not fit .* run.check_memory=false"):
        check_memory(parse_config(values), world_size=1, device_bytes=2**30)
    assert check_memory(parse_config(values), world_size=1, device_bytes=None) is None
    off = parse_config(values | {"run": {"check_memory": False}})
    assert check_memory(off, world_size=1, device_bytes=2**30) is None
