"""Steps of starting that training and evaluation share, and the start of the watchdog."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, ConfigError, load_config, read_mapping
from megatron_rl.config.sections import AFTER_THINKING, MATH_ANSWER
from megatron_rl.data.rendering import TurnRenderer
from megatron_rl.data.tokenizer import load_tokenizer
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
from megatron_rl.runtime.processes import shared_folder
from megatron_rl.runtime.watchdog import (
    Heartbeat,
    allocate_heartbeats,
    answer_by_stacks,
    map_heartbeats,
)
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
                pool = stack.enter_context(EnvironmentPool(settings, config.workers, echo=echo))
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
    link.orders.send("start", config)
    yield gather_from_ranks(link.values.take())[0], None


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


GRACE = 120.0  # seconds, so that more specific limits are reported first
_MOST_WATCHERS = 5  # that are started one after the other when they are killed
SLOW_PHASES = ("start", "checkpoint", "export")  # phases with twice the limit


def longest_silence(config: Config) -> float:
    """Maximum seconds of any phase without progress; infinite without a watchdog."""
    stall = config.trainer.stall_seconds
    if stall is None:
        return float("inf")
    return max(2 * stall, config.resharding.time_limit_seconds + GRACE)


def watch(
    config: Config,
    directory: RunDirectory,
    *,
    rank: int,
    link: Link | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> tuple[Heartbeat, str | None]:
    """Start one watchdog process per node; returns this rank's heartbeat and a warning. Collective.

    The warning is the reason why no watchdog could be started. link: joins this rank with others
    that have groups of their own; `rank` is then its number there. log: receives a line when the
    watchdog was killed, and another one is started.
    """
    stall = config.trainer.stall_seconds
    if stall is None:
        return Heartbeat(), None
    budgets = dict.fromkeys(SLOW_PHASES, 2 * stall)
    budgets["sync"] = max(stall, config.resharding.time_limit_seconds + GRACE)
    # Containers may share a host name; processes see each other in one PID namespace.
    node = f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    nodes = gather_from_ranks(node, link=link)
    ranks = [other for other, where in enumerate(nodes) if where == node]
    place = ranks.index(rank)
    progress = None
    with contextlib.ExitStack() as stack:
        folder, problem = _make_folder(stack, len(ranks)) if place == 0 else (None, None)
        folder = gather_from_ranks(folder, link=link)[ranks[0]]
        if folder is not None:
            try:
                progress = _open(folder, place, budget=stall, budgets=budgets)
            except OSError as error:
                problem = error
        is_open = gather_from_ranks(progress is not None, link=link)
        if place == 0 and folder is not None and all(is_open[other] for other in ranks):
            _start_watcher(folder, ranks, reports=directory.stalls, log=log)
    if not all(is_open):
        return Heartbeat(), f"hangs will not be detected: the watchdog cannot start ({problem})"
    assert progress is not None
    return progress, None


def _make_folder(stack: contextlib.ExitStack, ranks: int) -> tuple[Path | None, OSError | None]:
    """Create a folder in memory with the board and a file for each rank's stacks."""
    try:
        folder = stack.enter_context(shared_folder())
        with (folder / "board").open("wb") as file:
            allocate_heartbeats(file.fileno(), ranks=ranks)
        for place in range(ranks):
            (folder / f"stacks{place}").touch()
    except OSError as error:
        return None, error
    return folder, None


def _open(folder: Path, place: int, *, budget: float, budgets: dict[str, float]) -> Heartbeat:
    # Stays open for as long as this process lives.
    stacks = os.open(folder / f"stacks{place}", os.O_WRONLY | os.O_APPEND)
    answer_by_stacks(stacks)
    with (folder / "board").open("r+b") as file:
        board = map_heartbeats(file.fileno())
    return Heartbeat(board, place, budget=budget, budgets=budgets)


def _start_watcher(
    folder: Path, ranks: list[int], *, reports: Path, log: Callable[[str], object]
) -> None:
    """Start the watchdog with open files, so that the folder can be removed.

    A thread waits for its end, and starts another one if it was killed.
    """
    board = os.open(folder / "board", os.O_RDWR)
    stacks = [os.open(folder / f"stacks{place}", os.O_RDONLY) for place in range(len(ranks))]
    start: Callable[[], Any] = partial(
        subprocess.Popen,
        [
            *(sys.executable, "-m", "megatron_rl.runtime.watchdog", "--board", str(board)),
            *("--ranks", ",".join(map(str, ranks)), "--stacks", ",".join(map(str, stacks))),
            *("--folder", str(reports)),
        ],
        pass_fds=[board, *stacks],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )

    def keep(process: Any) -> None:
        for remaining in reversed(range(_MOST_WATCHERS)):
            if (status := process.wait()) == 0:
                return
            then = "starting another one" if remaining else "hangs are not detected from now on"
            with contextlib.suppress(OSError):  # the disk may be full
                log(f"the watchdog of this node has ended (exit status {status}): {then}")
            if remaining:
                process = start()

    threading.Thread(target=keep, args=(start(),), daemon=True, name="watchdog").start()
