"""Settings of prompts: what is trained on, and what is held out."""

from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from megatron_rl.config.sections import Count, Fraction, Name, NonNegative, Positive, Section

# Of transformers' apply_chat_template, beside what it hands on to the template.
OF_THE_CALL = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip


class ColumnsSection(Section):
    """Which columns of a file of prompts hold what; a dot reaches into a struct."""

    prompt: str = "prompt"
    """a text, the user's message, or a list of chat messages"""
    answer: str = "reward_model.ground_truth"
    """the ground truth, a text or a number"""
    source: str | None = None
    """where a row comes from; null: the column `data_source` where there is one, else the file's
    name"""


class MixedSetSection(Section):
    """One of several sets of training prompts."""

    path: str
    """as `data.train`"""
    weight: Positive = 1.0
    """its part of every rollout batch, in proportion to the others'"""
    columns: ColumnsSection | None = None
    """null: those of `data.columns`"""


class DataSection(Section):
    """Training prompts."""

    train: str = ""
    """a file of prompts, .parquet or .jsonl, a data set as `hf:OWNER/NAME`, or a folder that
    `datasets` saved (`docs/prompts.md`); this or `data.mix` must be given"""
    mix: dict[Name, MixedSetSection] = Field(default_factory=dict)
    """name: `{path, weight, columns}` of several sets, instead of `data.train`"""
    columns: ColumnsSection = ColumnsSection()
    """of `data.train`, and of `eval.sets` where `eval.columns` is null; by default the schema of
    DAPO-Math-17k"""
    max_prompt_tokens: Count = 1024
    """the longest prompt, in tokens"""
    too_long: Literal["error", "skip"] = "error"
    """a prompt that is longer: refuse the file, or leave the prompt out and say how many were"""
    bad_rows: Literal["error", "skip"] = "error"
    """a malformed row: refuse the file, or leave the row out and say how many were"""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """of the chat template, as `{enable_thinking: false}`"""

    @field_validator("template_arguments")
    @classmethod
    def _refuse_the_call_s_own(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(arguments.keys() & OF_THE_CALL):
            raise ValueError(f"{', '.join(own)}: not of the template, the run sets it; remove it")
        return arguments


class EvaluationSetSection(Section):
    """One set of held-out problems; its path alone says the same as `{path: ...}`."""

    path: str
    """as `data.train`"""
    columns: ColumnsSection | None = None
    """null: those of `eval.columns`"""

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
    """name: file of prompts, as `data.train`, or `{path, columns}`"""
    columns: ColumnsSection | None = None
    """of files that name none; null: those of `data.columns`"""
    every: Count = 10
    """steps"""
    samples: Count = 32
    """responses to each prompt"""
    temperature: NonNegative = 0.7
    """of sampling; 0: the likeliest token, one response to each prompt"""
    top_p: Fraction = 0.9
    """of sampling"""
