"""Trials of a verifier and an environment on a real row, in processes with time limits.

They run before a run starts.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.config import Config
from megatron_rl.config.sections import MATH_ANSWER, RewardSection
from megatron_rl.data.rendering import TurnRenderer, as_messages, render
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.environments.call_formats import PARSERS, CallFormat, ToolCall, parse_calls
from megatron_rl.environments.interface import (
    BrokenEnvironmentError,
    EnvironmentFailure,
    TurnTokens,
)
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.errors import UserError
from megatron_rl.messages import with_text_arguments
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import NUMBER, Item, VerifierError
from megatron_rl.types import GradeResult, Prompt
from megatron_rl.workers.client import START_SECONDS

MESSAGE_SECONDS = 10.0  # seconds before a message explains what the command waits for
_FRAME = re.compile(r'^ *File "(?P<file>.+?)", line (?P<line>\d+)')
_NOT_USER_CODE = (str(Path(megatron_rl.__file__).parent), "<frozen ", "importlib")
_MAX_CHARACTERS = 400  # characters of a verifier's error


@dataclass
class VerifierTrial:
    """Worker that loads the verifier while other checks run, then grades one row."""

    reward: RewardSection
    pool: VerifierPool | None
    printed: list[str] = field(default_factory=list)
    problem: str | None = None  # why no worker could be started

    def problems(self, prompt: Prompt | None, *, keep_best: bool | str) -> list[str]:
        """List why the verifier cannot be used; prompt: the row to try it on, if any."""
        if self.pool is None:
            return [self._name(self.problem or "")]
        waiting = threading.Timer(MESSAGE_SECONDS, self._explain_waiting)
        waiting.daemon = True
        waiting.start()
        try:
            self.pool.start()
            if prompt is not None:
                item = Item("", prompt.ground_truth, prompt.data_source, prompt.row)
                results = self.pool.try_on(item)
                return [
                    *_score_problems(results, self.reward),
                    *vote_problems(results, self.reward, keep_best=keep_best),
                ]
        except VerifierError as error:
            return [self._name(describe(str(error), printed=self.printed))]
        finally:
            waiting.cancel()
        return []

    def _name(self, what: str) -> str:
        name = self.reward.verifier or MATH_ANSWER
        return f"reward.verifier={name}: {what.removeprefix(name).lstrip(': ')}"

    def _explain_waiting(self) -> None:
        print(  # noqa: T201 - the command has no console yet
            f"megatron-rl: waiting for reward.verifier={self.reward.verifier or MATH_ANSWER} to be "
            f"imported and tried (at most {START_SECONDS:.0f} s)",
            file=sys.stderr,
            flush=True,
        )


def _score_problems(grade_results: Sequence[GradeResult], reward: RewardSection) -> list[str]:
    """List why rewards by name are not what they were in verl, where `score` alone is trained."""
    names = {name for one in grade_results for name in one.rewards}
    if "score" not in names or len(names) == 1 or reward.weights:
        return []
    weights = ", ".join(f"{name}: {int(name == 'score')}" for name in sorted(names))
    return [
        f"reward.verifier={reward.verifier}: returns {', '.join(sorted(names))}, which add up to "
        "the reward here, while verl trains score and records the others; set "
        f"reward.weights={{{weights}}}, or other weights"
    ]


def vote_problems(
    grade_results: Sequence[GradeResult], reward: RewardSection, *, keep_best: bool | str
) -> list[str]:
    """List why these trial results give no majority vote for `trainer.keep_best`."""
    if "/maj@" not in str(keep_best) or any(one.reason != NUMBER for one in grade_results):
        return []
    return [
        f"trainer.keep_best={keep_best}: a majority vote needs answers, and reward.verifier="
        f"{reward.verifier} returns a reward alone, so this score is always null; let it return "
        "(reward, reason, answer), or keep the best by avg@ or pass@"
    ]


@contextlib.contextmanager
def start_trial(config: Config) -> Iterator[VerifierTrial]:
    """Start a worker that loads the verifier, and stop it when the context exits."""
    reward, printed = config.reward, list[str]()
    try:
        pool = VerifierPool(reward, config.workers, echo=printed.append)
    except VerifierError as error:
        yield VerifierTrial(reward, None, printed, str(error))
        return
    with pool:
        yield VerifierTrial(reward, pool, printed)


def describe(text: str, *, printed: list[str]) -> str:
    """Shorten a pool's error to one text: the error, the line of user code, and how to fix it."""
    head, _, trace = text.partition("\n")
    if not trace:
        last = f"; it printed: {printed[-1]}" if printed else ""
        return head.replace("; its output is in the log", "") + _exit_hint(head) + last
    is_import = "did not start" in head
    lines = trace.rstrip().splitlines()
    frames = [n for n, line in enumerate(lines) if _FRAME.match(line)]
    after = (frames or [-1])[-1] + 1
    raised = [line for line in lines[after:] if line and not line.startswith(" ")]
    what = " ".join(raised)[:_MAX_CHARACTERS]
    user_frames = [
        m
        for m in map(_FRAME.match, lines)
        if m and not any(part in m["file"] for part in _NOT_USER_CODE)
    ]
    if not user_frames:  # raised by this package: a wrong name or return value, with a hint
        return what.partition(": ")[2] if re.match(r"[\w.]+Error: ", what) else what
    place = f"{user_frames[-1]['file']}, line {user_frames[-1]['line']}"
    if is_import:
        return f"importing it failed: {what} ({place}); correct it, or install what it imports"
    return (
        f"it failed when it was tried: {what} ({place}); it is tried on the first row's ground "
        "truth and on an empty response, and must return a reward for both"
    )


def _exit_hint(head: str) -> str:
    """Return a hint for errors without a traceback: the process exited or hung."""
    if "exit status" in head:
        return ": it ended its process (sys.exit, os._exit, or a crash); return a reward instead"
    if "did not start in" in head:
        return (
            ": importing its module does not finish, or the machine is overloaded; move slow work "
            "into the function"
        )
    return ""


GRACE_SECONDS = 30.0  # for a process that is killed at its time limit and started again
CURES = {
    "failed": "the policy can write any turn, so it needs an Answer too, or set "
    "environment.on_error=zero, which gives such a conversation no reward",
    "rewritten": "send them unchanged, or raise environment.max_rewrites",
    "timed_out": "raise environment.time_limit_seconds, or let it answer sooner",
    "lost": "start what it needs",
}


@dataclass
class EnvironmentTrial:
    """A worker that loads the environment while other checks run, then answers one turn."""

    config: Config
    pool: EnvironmentPool | None
    printed: list[str] = field(default_factory=list)
    problem: str | None = None  # why no worker could be started

    def problems(self) -> list[str]:
        """List why the environment cannot be loaded."""
        if self.pool is None:
            return [] if self.problem is None else [self._name(self.problem)]
        try:
            self.pool.start()
        except BrokenEnvironmentError as error:
            return [self._name(describe(str(error), printed=self.printed))]
        return []

    def with_tools(self) -> Config:
        """Return the config with the loaded environment's tools as an argument of the template."""
        return self.config if self.pool is None else with_tools(self.config, self.pool.tools)

    def try_on(self, prompt: Prompt | None) -> list[str]:
        """List what is wrong with the answer to a first turn of this row.

        The turn is empty where a failure would end the run.
        """
        if self.pool is None or prompt is None:
            return []
        self.pool.begin(0, prompt.row, 0)
        assert self.config.environment is not None
        turn = "" if self.config.environment.on_error == "end" else "."
        tried = f"tried with {'the turn .' if turn else 'an empty turn'}, it"
        tokenizer = load_tokenizer(self.config.model.path, **self.config.tokenizer_options)
        sampled = [*tokenizer(turn, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens = TurnTokens(list(prompt.token_ids), sampled, [0.0] * len(sampled), True)
        limit = self.pool_limit
        try:
            self.pool.send(0, turn, tokens)
            results = self.pool.poll(limit + GRACE_SECONDS)
        except BrokenEnvironmentError as error:
            return [self._name(describe(str(error), printed=self.printed))]
        if not results:
            return [self._name(f"{tried} did not answer in {limit:g} s")]
        answer = results[0][1]
        if isinstance(answer, EnvironmentFailure):
            text = answer.text.removeprefix(f"{self.pool.settings.name} ")
            cure = "" if "; " in text else f"; {CURES[answer.kind]}"
            return [self._name(f"{tried} {text}{cure}")]
        if answer.restarts and not self.config.environment.max_rewrites:
            cure = "environment.max_rewrites=0 refuses; raise it, or return an observation to add"
            return [self._name(f"{tried} returned restarts=True, which {cure}")]
        config = self.with_tools()
        renderer = TurnRenderer(tokenizer, config.data.template, config.data.rendering)
        shown = prompt.tools or config.data.rendering.get("tools") or ()
        written_as = self.pool.description.get("call_format")
        if written_as and shown and config.data.template == "chat":
            arguments = dict(config.data.rendering) | {"tools": list(shown)}
            if wrong := call_format_problem(written_as, shown[0], tokenizer, arguments):
                return [self._name(wrong)]
        try:
            for tool in self.pool.tools[:1]:  # its results are messages, in any later turn
                result = {"role": "tool", "name": tool["function"]["name"], "content": "7"}
                renderer.render(prompt.messages, [result], tools=prompt.tools)
            if answer.done or answer.token_ids is not None:
                return []
            messages = as_messages(answer.observation)
            if answer.restarts:
                renderer.begin(messages, tools=prompt.tools)
            else:
                renderer.render(prompt.messages, messages, tools=prompt.tools)
        except ValueError as error:
            return [self._name(str(error))]
        return []

    @property
    def pool_limit(self) -> float:
        assert self.config.environment is not None
        return self.config.environment.time_limit_seconds

    def _name(self, what: str) -> str:
        assert self.config.environment is not None
        return f"environment.name={self.config.environment.name}: {what}"


_EXAMPLES = {"integer": 7, "number": 0.5, "boolean": True, "array": [1], "object": {"a": 1}}


def call_format_problem(
    call_format: str, tool: Mapping[str, Any], tokenizer: Any, arguments: Mapping[str, Any]
) -> str | None:
    """Return why a class's call_format does not read the calls that the chat template writes.

    None also for a template that writes no calls, or refuses them, which nothing can be compared
    with: the policy's own turns are never written again.
    """
    function = tool["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    values = {
        name: next(iter(one.get("enum", ())), _EXAMPLES.get(one.get("type"), "two words"))
        for name, one in properties.items()
    }
    call = {"type": "function", "function": {"name": function["name"], "arguments": values}}
    question = {"role": "user", "content": "What is asked here?"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    texts = []
    for form in ([turn], with_text_arguments([turn])):
        with contextlib.suppress(UserError):
            text = render([question, *form], (), tokenizer, arguments=arguments, generate=False)
            texts.append(text.rpartition(question["content"])[2])
    texts = [text for text in texts if function["name"] in text]
    reading = [
        name
        for name in PARSERS
        if any(
            [(one.name, one.arguments) for one in _read(text, name, tool)]
            == [(function["name"], values)]
            for text in texts
        )
    ]
    if not texts or call_format in reading:
        return None
    cure = f"set call_format = {reading[0]!r} in the class" if reading else (
        f"of the formats {', '.join(PARSERS)} none does: repair chat_template.jinja"
    )  # fmt: skip
    return (
        f"the chat template writes a call as {texts[0].strip()[:200]!r}, which call_format="
        f"{call_format!r} does not read; {cure}"
    )


def _read(text: str, call_format: CallFormat, tool: Mapping[str, Any]) -> list[ToolCall]:
    return parse_calls(text, call_format, in_thinking=False, tools=[tool])


@contextlib.contextmanager
def start_environment_trial(config: Config) -> Iterator[EnvironmentTrial]:
    """Start a worker that loads the environment, if there is one; stop it on exit."""
    printed: list[str] = []
    if config.environment is None:
        yield EnvironmentTrial(config, None)
        return
    try:
        settings = config.environment.model_copy(update={"on_error": "zero"})
        pool = EnvironmentPool(settings, config.workers, echo=printed.append)
    except BrokenEnvironmentError as error:
        yield EnvironmentTrial(config, None, problem=str(error))
        return
    with pool:
        yield EnvironmentTrial(config, pool, printed)


def with_tools(config: Config, tools: list[dict[str, Any]]) -> Config:
    """Return the config with tools among the arguments of the chat template, if there are any."""
    if not tools or config.data.template == "raw":
        return config
    arguments = {**config.data.template_arguments, "tools": tools}
    data = config.data.model_copy(update={"template_arguments": arguments})
    return config.model_copy(update={"data": data})
