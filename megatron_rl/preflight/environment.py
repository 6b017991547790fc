"""Trial of an environment before a run starts, in a process with a time limit."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import Config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.turns import TurnRenderer, as_messages
from megatron_rl.environments.interface import (
    BrokenEnvironmentError,
    EnvironmentFailure,
    TurnTokens,
)
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.preflight.verifier import describe
from megatron_rl.types import Prompt

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


@contextlib.contextmanager
def start_environment_trial(config: Config) -> Iterator[EnvironmentTrial]:
    """Start a worker that loads the environment, if there is one; stop it on exit."""
    printed: list[str] = []
    if config.environment is None:
        yield EnvironmentTrial(config, None)
        return
    try:
        settings = config.environment.model_copy(update={"on_error": "zero"})
        pool = EnvironmentPool(settings, echo=printed.append)
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
