"""Start of the environments of a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.turns import TurnRenderer
from megatron_rl.distributed.agreement import gather_from_ranks, sync_errors_across_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import ConversationSettings
from megatron_rl.environments.interface import BrokenEnvironmentError
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.preflight.trials import with_tools


@contextlib.contextmanager
def open_conversations(
    config: Config,
    topology: Topology,
    *,
    echo: Callable[[str], object],
    journals: Path | None = None,
) -> Iterator[tuple[Config, ConversationSettings | None]]:
    """Start the environments on the first rank of each engine, and stop them on exit. Collective.

    echo: receives what environments print. journals: folder for answers, so
    that a resumed run repeats no side effect. Yields the config whose chat
    template shows the environment's tools, and the settings of conversations; None without an
    environment.
    """
    settings = config.environment
    if settings is None:
        yield config, None
        return
    tensor = config.rollout.tensor
    with contextlib.ExitStack() as stack:
        pool = None
        with sync_errors_across_ranks(doing="starting the environments"):
            if topology.rank % tensor == 0:
                pool = stack.enter_context(EnvironmentPool(settings, echo=echo))
                try:
                    pool.start()
                except BrokenEnvironmentError as error:
                    raise ConfigError(f"environment.name={settings.name}: {error}") from None
        tools = gather_from_ranks(pool.tools if pool is not None else [])[0]
        config = with_tools(config, tools)
        renderer = TurnRenderer(
            load_tokenizer(config.model.path, **config.tokenizer_options),
            config.data.template,
            config.data.rendering,
        )
        yield (
            config,
            ConversationSettings(
                pool,
                renderer,
                max_turns=settings.max_turns,
                max_turn_tokens=settings.max_turn_tokens or config.rollout.max_response_tokens,
                in_rounds=settings.in_rounds,
                journals=journals,
            ),
        )
