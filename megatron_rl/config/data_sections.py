"""Sections of a config for prompts: training sets and held-out evaluation sets."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from megatron_rl.config.paths import PathText
from megatron_rl.config.sections import Count, Fraction, Name, NonNegative, Positive, Section

# Parameters of transformers' apply_chat_template that it does not pass on to the template.
RESERVED_ARGUMENTS = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class FixedDate:
    """The function `strftime_now` of chat templates for one date, at midnight, instead of now."""

    date: str  # YYYY-MM-DD

    def __call__(self, format: str) -> str:
        return datetime.fromisoformat(self.date).strftime(format)


def _as_date(value: Any) -> str:
    """Return YAML's date or a text as YYYY-MM-DD."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a date as YYYY-MM-DD, such as 2026-01-31") from None


class ColumnsSection(Section):
    """Column names of a prompt file; a dot selects a field of a struct."""

    prompt: str = "prompt"
    """Column of the prompt: the user's message as text, or a list of chat messages."""
    answer: str = "reward_model.ground_truth"
    """Column of the ground truth, a text or a number."""
    source: str | None = None
    """Column of the data source; null uses the column `data_source` if it exists, otherwise the
    file's name."""
    tools: str | None = None
    """Column of the tools that the chat template shows, a list of schemas or its JSON text; null
    uses the column `tools` if it exists (`docs/prompts.md`)."""


class MixedSetSection(Section):
    """One of several sets of training prompts."""

    path: PathText
    """File or data set of prompts, in the forms of `data.train`."""
    weight: Positive = 1.0
    """Relative share of this set in every rollout batch."""
    columns: ColumnsSection | None = None
    """Column names of this set; null uses `data.columns`."""


class DataSection(Section):
    """Training prompts."""

    train: PathText = ""
    """Training prompts: a .parquet, .jsonl or .csv file, a data set as `hf:OWNER/NAME`, or a folder
    saved by `datasets` (`docs/prompts.md`). Either this or `data.mix` is required."""
    mix: dict[Name, MixedSetSection] = Field(default_factory=dict)
    """Several training sets by name, each `{path, weight, columns}`, instead of `data.train`."""
    epochs: Positive | None = None
    """Length of the run in passes over the training prompts, instead of `trainer.steps`, which the
    start of the run computes from it (`docs/prompts.md`); null uses `trainer.steps`."""
    columns: ColumnsSection = ColumnsSection()
    """Column names of `data.train`, and of `eval.sets` if `eval.columns` is null; the default is
    the schema of DAPO-Math-17k."""
    max_prompt_tokens: Count = 1024
    """Maximum prompt length in tokens."""
    too_long: Literal["error", "skip"] = "error"
    """Reaction to a prompt above the maximum length: `error` rejects the file, `skip` leaves the
    prompt out and reports the number of skipped prompts."""
    bad_rows: Literal["error", "skip"] = "error"
    """Reaction to a malformed row: `error` rejects the file, `skip` leaves the row out and reports
    the number of skipped rows."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message put in front of every prompt, in training and in evaluation; a row with a
    system message of its own is then malformed. null adds none."""
    template: Literal["chat", "raw"] = "chat"
    """Format of a prompt: `chat` applies the model's chat template, `raw` uses the text unchanged,
    for base models (`docs/prompts.md`)."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the chat template, such as `{enable_thinking: false}`."""
    date: Annotated[str, BeforeValidator(_as_date)] | None = None
    """Date as YYYY-MM-DD for chat templates that write today's date, such as Llama 3.2's and
    gpt-oss's; null uses the date of the run's first start, also after a resume and when the run is
    evaluated."""

    @property
    def rendering(self) -> dict[str, Any]:
        """All arguments of the chat template."""
        fixed = {} if self.date is None else {"strftime_now": FixedDate(self.date)}
        return fixed | self.template_arguments

    @field_validator("template_arguments")
    @classmethod
    def _refuse_reserved_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(arguments.keys() & RESERVED_ARGUMENTS):
            raise ValueError(
                f"{', '.join(reserved)}: set by the run, not an argument of the template; remove it"
            )
        return arguments


def epochs_problems(config: Any) -> list[str]:
    """List conflicts of `config.data.epochs` with other settings of a `Config`."""
    epochs, problems = config.data.epochs, []
    if epochs is not None and "steps" in config.trainer.model_fields_set:
        problems.append(
            f"data.epochs={epochs:g} and trainer.steps={config.trainer.steps} both set the length "
            "of the run; remove trainer.steps, or set data.epochs=null"
        )
    if epochs is not None and config.offline.rollouts is not None:
        problems.append(
            f"data.epochs={epochs:g} counts passes over prompts, but offline.rollouts reads none; "
            "set data.epochs=null and trainer.steps"
        )
    if epochs is not None and config.environment is not None and config.data.too_long == "skip":
        problems.append(
            f"data.epochs={epochs:g} cannot count the prompts that data.too_long=skip leaves out "
            "where an environment adds its tools to them; set data.epochs=null and trainer.steps"
        )
    return problems


class EvaluationSetSection(Section):
    """One set of held-out problems; a path alone is short for `{path: ...}`."""

    path: PathText
    """File or data set of prompts, in the forms of `data.train`."""
    columns: ColumnsSection | None = None
    """Column names of this set; null uses `eval.columns`."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if not isinstance(value, (str, dict, cls)):
            raise ValueError("must be a path, or a mapping of path and columns")
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_path(self, whole: SerializerFunctionWrapHandler) -> Any:
        return self.path if self.columns is None else whole(self)


class EvalSection(Section):
    """Held-out evaluation: Avg@samples, before, during and after training."""

    sets: dict[Name, EvaluationSetSection] = Field(default_factory=dict)
    """Evaluation sets by name, each a path in the forms of `data.train` or `{path, columns}`."""
    columns: ColumnsSection | None = None
    """Column names of sets without their own; null uses `data.columns`."""
    every: Count = 10
    """Steps between evaluations."""
    samples: Count = 32
    """Number of responses to each prompt."""
    temperature: NonNegative = 0.7
    """Sampling temperature; 0 is greedy decoding with one response to each prompt."""
    top_p: Fraction = 0.9
    """Nucleus sampling: cumulative probability of the tokens that are sampled from; 1 disables
    it."""
