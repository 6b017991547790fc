"""Steps of starting that training and evaluation share: environments, verifier, date in prompts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

from megatron_rl.config import Config, ConfigError, load_config, read_mapping
from megatron_rl.config.sections import AFTER_THINKING, MATH_ANSWER
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.turns import TurnRenderer
from megatron_rl.distributed.agreement import (
    gather_from_ranks,
    run_on_rank_0,
    sync_errors_across_ranks,
)
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import ConversationSettings
from megatron_rl.environments.interface import BrokenEnvironmentError
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.preflight.trials import with_tools
from megatron_rl.rewards.thinking import ends_inside_thinking
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.types import Prompt


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


@contextlib.contextmanager
def open_elsewhere(
    config: Config, link: Link
) -> Iterator[tuple[Config, ConversationSettings | None]]:
    """Let engines on ranks of their own start the environments, which end with them. Collective.

    Yields the config whose chat template shows the environment's tools; the engines alone have the
    settings of conversations.
    """
    link.order("start", config)
    yield gather_from_ranks(link.take())[0], None


def choose_verifier(
    config: Config,
    directory: RunDirectory,
    prompts: Sequence[Prompt],
    *,
    echo: Callable[[str], object],
) -> Config:
    """Return the config with `reward.verifier`, if it is null and there are prompts. Collective.

    The first prompt decides. A resumed run keeps the verifier of its first start, which the run
    directory has in config.yaml.
    """
    if config.reward.verifier is not None or not prompts:
        return config

    def find() -> str:
        if directory.has_started():
            saved = load_config(directory.config_file).reward.verifier
            if saved in (MATH_ANSWER, AFTER_THINKING):
                return saved
        return AFTER_THINKING if _opens_thinking(config, prompts[0]) else MATH_ANSWER

    verifier = run_on_rank_0(find, doing="choosing the verifier")
    if verifier == AFTER_THINKING:
        echo(
            "prompts end inside thinking: a response that does not end it has no answer "
            f"(reward.verifier={verifier}; set another one to change this)"
        )
    reward = config.reward.model_copy(update={"verifier": verifier})
    return config.model_copy(update={"reward": reward})


def _opens_thinking(config: Config, prompt: Prompt) -> bool:
    """Return True if a verifier would see in a response where the prompt's thinking ends."""
    message = str(prompt.messages[-1].get("content") or "")
    if not ends_inside_thinking(prompt.text, last_message=message):
        return False
    # Marks that are special tokens are not in the text of a response, so it would never end.
    tokenizer = load_tokenizer(config.model.path, **config.tokenizer_options)
    text = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=True)
    return ends_inside_thinking(text, last_message=message)


def fix_date(config: Config, directory: RunDirectory, *, echo: Callable[[str], object]) -> Config:
    """Return the config with `data.date`, if the chat template writes a date. Collective.

    It is that of the config, else that of the run's first start, else today's. The run directory
    keeps it in config.yaml.
    """

    def find() -> str | None:
        data = config.data
        if data.date or data.template == "raw" or not has_date(Path(config.model.path)):
            return data.date
        saved = read_mapping(directory.config_file) if directory.config_file.is_file() else {}
        return (saved.get("data") or {}).get("date") or date.today().isoformat()

    day = run_on_rank_0(find, doing="reading the date of the prompts")
    if day is None:
        return config
    echo(f"the chat template writes the date into prompts: {day} (data.date)")
    data = config.data.model_copy(update={"date": str(day)})
    return config.model_copy(update={"data": data})


def has_date(folder: Path) -> bool:
    """Return True if a chat template of a model folder calls `strftime_now`."""
    places = ("tokenizer_config.json", "chat_template*", "additional_chat_templates/*")
    files = [file for place in places for file in folder.glob(place) if file.is_file()]
    return any(b"strftime_now" in file.read_bytes() for file in files)
