"""Reinforcement-learning post-training of language models with Megatron-core and vLLM."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.config import Config

__version__ = "0.1.0"  # the one place: setup.py reads it here


def train(
    config: "Mapping[str, Any] | str | Path | Config",
    *,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Train, print what `megatron-rl train` prints, and return the run directory.

    Args:
        config: settings as a mapping, the path of a YAML file, or a `megatron_rl.config.Config`.
        reward: the verifier, in place of `reward.verifier`; any function, also one of a notebook.
        overrides: `key=value`, as for the command.

    Raises ConfigError for wrong settings, RuntimeError with the last lines if the run fails, and
    KeyboardInterrupt after an interrupt (Ctrl-C, a notebook's stop button), when all is saved.
    """
    from megatron_rl.python_api import run_command  # imported when called: this module stays light

    return run_command(config, reward=reward, overrides=overrides)
