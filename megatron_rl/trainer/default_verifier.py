"""The default verifier of a run, by the prompts that it gets."""

from collections.abc import Callable, Sequence

from megatron_rl.config import Config, load_config
from megatron_rl.config.sections import AFTER_THINKING, MATH_ANSWER
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.rewards.thinking import ends_inside_thinking
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.types import Prompt


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
