"""Resolution of `data.epochs` to `trainer.steps`, by the number of prompts."""

import math
import threading
from collections.abc import Callable

from megatron_rl.config import Config, ConfigError, parse_config
from megatron_rl.data.prompts import share
from megatron_rl.preflight.verifier import PATIENCE
from megatron_rl.rollouts.prompt_files import build_order, count_prompts


def resolve_epochs(
    config: Config, *, echo: Callable[[str], object] = lambda text: None
) -> tuple[Config, list[str]]:
    """Return the config with the steps of `data.epochs`, and equal overrides for other processes.

    A pass has as many steps as `PromptOrder` makes of it: whole ones, without the prompts left
    over. Resolved again from the same prompts, as for a resumed run, it gives the same steps.
    echo: receives a line with the result. Raises ConfigError if the prompts cannot be counted.
    """
    if (epochs := config.data.epochs) is None:
        return config, []
    files = ", ".join(path for path, _, _ in config.training.values())
    waiting = threading.Timer(PATIENCE, echo, (f"counting the prompts of {files} for data.epochs",))
    waiting.daemon = True
    waiting.start()
    try:
        sizes = count_prompts(config)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"data.epochs={epochs:g} needs the number of prompts, but: {error}\n  or give the "
            "length of the run without it, by data.epochs=null and trainer.steps"
        ) from error
    finally:
        waiting.cancel()
    build_order(config, [*sizes.values()])  # raises where there are too few
    fresh = config.fresh_groups
    per_pass = sum(sizes.values()) // fresh
    # The first step has no groups to replay, so its new prompts are those of several later steps.
    steps = max(
        1, round(epochs * per_pass) - math.ceil(config.rollout.prompts_per_step / fresh) + 1
    )
    echo(
        f"data.epochs={epochs:g}: {sum(sizes.values()):,} prompts, {fresh} per step, so {per_pass} "
        f"steps per epoch: trainer.steps={steps}{_describe_mix(config, sizes, steps)}"
    )
    values = config.model_dump()
    values["data"]["epochs"], values["trainer"]["steps"] = None, steps
    return parse_config(values), [f"trainer.steps={steps}", "data.epochs=null"]


def _describe_mix(config: Config, sizes: dict[str, int], steps: int) -> str:
    """Describe how often the run passes over each set of `data.mix`, by their weights."""
    if not config.data.mix:
        return ""
    shares = share(config.fresh_groups, [weight for _, _, weight in config.training.values()])
    passes = [
        f"{key} {steps * part / size:.1f} times"
        for (key, size), part in zip(sizes.items(), shares, strict=True)
    ]
    return f"; by their weights it passes over {', '.join(passes)}"
