"""A launch checks the run's files by the job's interpreter; what it cannot check it reports."""

import sys

import pytest

from megatron_rl.apps.launch.inputs import check_inputs
from megatron_rl.config import ConfigError
from tests.unit.apps.launch.test_launch import SLURM, config, plan

__all__ = ["config"]  # a fixture


def test_interpreter_of_job_finds_errors(config):
    with pytest.raises(
        ConfigError, match=r"(?s)launch cannot start:\n.*model/config\.json does not"
    ):
        check_inputs(plan(config, {"executor": "local", "python": sys.executable}))


def test_interpreter_that_cannot_check_is_warning(config):
    warning = check_inputs(plan(config, {"executor": "local", "python": "/usr/bin/env"}))
    assert warning.startswith("prompts, reward and weights were not checked: /usr/bin/env failed: ")


def test_run_on_other_machines_ignores_local_devices(config):
    """Transformer Engine needs CUDA, which a login node may lack."""
    launch = plan(
        config, SLURM | {"python": sys.executable}, "model.transformer_engine=true",
        "parallel.data=8", "rollout.prompts_per_step=8", "trainer.minibatches=1",
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        check_inputs(launch)
    assert "model.path: " in str(error.value) and "transformer_engine" not in str(error.value)
