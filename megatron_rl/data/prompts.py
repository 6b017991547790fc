"""Load and tokenize prompt sets, mix them by weight, and order their prompts over a run.

Prompts are in an arrow IPC file that every rank maps into its memory, instead of an object for each
prompt. A prompt becomes an object when it is used; what a rank has not used is in the page cache of
its node, once for all ranks.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.demonstrations import ConversationTokenizer
from megatron_rl.data.rendering import tokenize_chats
from megatron_rl.data.rows import (
    BAD_ROW_CURE,
    CONVERSATIONS,
    PROMPT,
    SOURCE,
    PlainRow,
    Row,
    name_row,
    parse_row,
    read_rows,
)
from megatron_rl.data.text_tokens import find_control_token
from megatron_rl.data.tokenizer import Template, check_arguments, check_raw, check_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.fields import find_place_of_media
from megatron_rl.messages import SYSTEMS, TOOLS, unread_keys
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Demonstration, Prompt

ROWS_AT_ONCE = 4096  # tokenized together, and in memory while a file is written
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0|")  # CSV: no name
_NUMBERS_OF_ROWS = {"index", "split"}  # all that verl's `extra_info` must have


def load_prompts(path: str | Path, tokenizer: Any, **options: Any) -> list[Prompt]:
    """Load all prompts that `read_prompts` yields, with its options."""
    return list(read_prompts(path, tokenizer, **options))


def read_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    columns: ColumnsSection | None = None,
    too_long: Literal["error", "skip"] = "error",
    bad_rows: Literal["error", "skip"] = "error",
    template: Template = "chat",
    template_arguments: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    first: int | None = None,
    conversations: ConversationTokenizer | None = None,
    echo: Callable[[str], object] = lambda text: None,
) -> Iterator[Prompt]:
    """Yield the distinct prompts of a parquet, JSON lines or CSV file with their tokens, in order.

    Rows that repeat an earlier row in every column are left out, and `echo` gets their number: the
    published DAPO-Math-17k contains each of its problems 100 times. `index` is the row in the file.

    too_long: whether a prompt of more than `max_prompt_tokens` tokens is an error or left out;
    bad_rows: whether a malformed row is, or one that the template refuses; `echo` gets how many.
    template: by the chat template, with template_arguments next to the messages, or `raw`: the
    messages' texts alone. system_prompt: before the messages of every row. first: read this many
    rows only; None: all.
    conversations: what reads rows that end with the assistant's answer, whose longest sequence is
    then limited by `max_prompt_tokens`, with the answer.
    Raises ValueError if the file cannot be read, is empty or without the columns, if a row is
    malformed, and at the end if a prompt is too long; the message names the row. Some thousand rows
    are in memory at once.
    """
    path = Path(path)
    _check_template(tokenizer, template, template_arguments or {})
    columns = columns or ColumnsSection()
    rows = read_distinct_rows(
        path, columns,
        bad_rows=bad_rows, system_prompt=system_prompt, first=first, echo=echo,
        conversations=conversations is not None,
    )  # fmt: skip
    refused = _Refused(bad_rows)
    unread = _Unread(
        tokenizer, columns, shown=dict(template_arguments or {}), is_raw=template == "raw",
        conversations=conversations is not None,
    )  # fmt: skip
    rows = unread.count(rows)
    longer = _TooLong(max_prompt_tokens)
    options: dict[str, Any] = {"path": path, "longer": longer, "refused": refused}
    if conversations is not None:
        yield from _read_conversations(rows, conversations, **options)
    else:
        options |= {"template": template, "arguments": template_arguments or {}}
        yield from _tokenize_prompts(rows, tokenizer, **options)
    if refused.count:
        echo(refused.describe(path, rows=longer.rows))
    if longer.count:
        echo(longer.refuse_or_describe(too_long, path=path))
    for line in unread.describe(path):
        echo(line)


def _check_template(tokenizer: Any, template: Template, arguments: Mapping[str, Any]) -> None:
    check_tokenizer(tokenizer, template=template)
    if template == "raw":
        check_raw(tokenizer)
    else:
        check_arguments(tokenizer, arguments)


def _tokenize_prompts(
    rows: Iterator[tuple[int, Row, str]],
    tokenizer: Any,
    *,
    path: Path,
    template: Template,
    arguments: Mapping[str, Any],
    longer: "_TooLong",
    refused: "_Refused",
) -> Iterator[Prompt]:
    while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
        token_ids = tokenize_chats(
            {number: (row.messages, row.tools) for number, row, _ in block},
            tokenizer, path=path, template=template, arguments=arguments, refused=refused,
        )  # fmt: skip
        if not (block := [one for one in block if one[0] in token_ids]):
            continue
        texts = tokenizer.batch_decode(list(token_ids.values()), skip_special_tokens=False)
        for (number, row, whole), text in zip(block, texts, strict=True):
            ids = token_ids[number]
            if not longer.count_if(number, len(ids)):
                yield _make_prompt(number, row, whole, ids, text)


def _make_prompt(
    number: int,
    row: Row,
    whole: str,
    ids: Sequence[int],
    text: str,
    demonstration: Demonstration | None = None,
) -> Prompt:
    return Prompt(
        index=number,
        messages=row.messages,
        token_ids=tuple(ids),
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        row=whole,
        text=text,
        tools=row.tools,
        demonstration=demonstration,
    )


def _read_conversations(
    rows: Iterator[tuple[int, Row, str]],
    conversations: ConversationTokenizer,
    *,
    path: Path,
    longer: "_TooLong",
    refused: "_Refused",
) -> Iterator[Prompt]:
    longer.name = "data.max_prompt_tokens + rollout.max_response_tokens"
    while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
        written, rows_written = [], []
        for number, row, whole in block:
            try:
                written.append(conversations.write((row.messages, row.tools)))
            except UserError as error:
                named = UserError(f"{name_row(path, number)}: {error}")
                named.__cause__ = error
                refused(named)
            else:
                rows_written.append((number, row, whole))
        if not written:
            continue
        found = conversations.join(written)
        texts = conversations.tokenizer.batch_decode(
            [ids for ids, _ in found], skip_special_tokens=False
        )
        for (number, row, whole), (ids, given), text in zip(
            rows_written, found, texts, strict=True
        ):
            bounds = [-len(ids), *given.restarts, len(given.token_ids)]
            if not longer.count_if(number, max(b - a for a, b in itertools.pairwise(bounds))):
                yield _make_prompt(number, row, whole, ids, text, given)


@dataclass(frozen=True)
class PromptOrder:
    """The prompts of each step, a function of (size, seed, step), so that resuming needs no state.

    Every epoch is a new permutation, split into whole steps. Prompts left over at its end are
    skipped in that epoch, so that no step contains the same prompt twice.
    """

    size: int  # prompts in the set
    seed: int

    def indices(self, step: int, count: int) -> list[int]:
        """Indices of the `count` different prompts of `step` (from 0).

        Raises ValueError if the set is smaller than one step.
        """
        if not 1 <= count <= self.size:
            raise UserError(
                f"a step of {count} prompts cannot be drawn from a set of {self.size} without "
                "repeating one; use fewer rollout.prompts_per_step or a larger set"
            )
        epoch, step_in_epoch = divmod(step, self.size // count)
        order = _permutations(self.size, self.seed)(epoch)
        return order[step_in_epoch * count : (step_in_epoch + 1) * count].tolist()


@lru_cache(maxsize=64)  # one for each set of a mix
def _permutations(size: int, seed: int) -> Callable[[int], np.ndarray]:
    """The permutation of each epoch of one order, of which the two used last are kept."""

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        # Sorting random keys, not Generator.permutation: NumPy keeps the bit stream of PCG64
        # forever, but may change what its methods make of it.
        keys = np.random.PCG64(derive_seed(seed, "prompt order", epoch)).random_raw(size)
        return np.argsort(keys, kind="stable")

    return permutation


def read_distinct_rows(
    path: Path,
    columns: ColumnsSection,
    *,
    bad_rows: Literal["error", "skip"],
    system_prompt: str | None,
    first: int | None = None,
    conversations: bool = False,
    echo: Callable[[str], object] = lambda text: None,
) -> Iterator[tuple[int, Row, str]]:
    """Yield each row's number, and it parsed and as JSON, unless it repeats an earlier one.

    Options and errors are the same as for `read_prompts`.
    """
    seen: set[bytes] = set()
    bad, first_bad, repeated = 0, None, 0
    rows = read_rows(path, columns, conversations=conversations)
    for number, plain in itertools.islice(rows, first):
        try:
            row = parse_row(
                plain, columns,
                path=path, number=number, system_prompt=system_prompt, conversations=conversations,
            )  # fmt: skip
        except ValueError as error:
            if bad_rows == "error":
                raise UserError(f"{error}; {BAD_ROW_CURE}") from None
            bad, first_bad = bad + 1, first_bad or error
            continue
        whole = json.dumps(plain, default=str)
        digest = hashlib.blake2b(_without_index(plain, whole).encode(), digest_size=16).digest()
        if digest in seen:
            repeated += 1
            continue
        seen.add(digest)
        yield number, row, whole
    if repeated:
        echo(
            f"{path}: {repeated} of {repeated + len(seen)} rows repeat an earlier row in every "
            "column: left out (a column that numbers the rows keeps them apart)"
        )
    if bad:
        echo(f"{path}: {bad} malformed rows left out (data.bad_rows=skip); the first: {first_bad}")
    if not seen:
        raise UserError(f"{path} holds no prompts: all of its rows are malformed")


def _without_index(row: PlainRow, text: str) -> str:
    """Return a row's JSON text without the columns that pandas writes for its index."""
    if isinstance(row, dict) and (index := [name for name in row if _INDEX.fullmatch(name)]):
        row = {name: value for name, value in row.items() if name not in index}
        return json.dumps(row, default=str)
    return text


def _sorts_rows(name: str, value: Any) -> bool:
    """Whether a column is one that verl's format always has and that only sorts or numbers rows."""
    if name == "extra_info":
        return isinstance(value, dict) and value.keys() <= _NUMBERS_OF_ROWS
    return name == "ability" and isinstance(value, str)


def _unread_parts(row: Mapping[str, Any], named: Iterable[str]) -> Iterator[str]:
    """Yield the fields that nothing reads of structs of which a dotted name reads one.

    verl's `reward_model.style` is not among them where it is a rule, as everything here is.
    """
    for name in named:
        head, _, part = name.partition(".")
        struct = row.get(head)
        if name in row or not part or not isinstance(struct, dict):
            continue
        for key, value in struct.items():
            is_rule = key == "style" and str(value).startswith("rule")
            if key != part.partition(".")[0] and value not in (None, "", [], {}) and not is_rule:
                yield f"{head}.{key}"


@dataclass
class _Unread:
    """Counts what rows and their messages have and nothing reads."""

    tokenizer: Any
    columns: ColumnsSection
    shown: Mapping[str, Any]  # arguments of the chat template
    is_raw: bool
    conversations: bool
    names: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    without_tools: int = 0  # rows with calls

    def count(self, rows: Iterator[tuple[int, Row, str]]) -> Iterator[tuple[int, Row, str]]:
        """Yield the rows and count what is not read."""
        given = self.columns
        named = [given.prompt, given.source or SOURCE, given.tools or TOOLS, *SYSTEMS]
        named += (
            [given.completion, *CONVERSATIONS, PROMPT] if self.conversations else [given.answer]
        )
        used = {part for name in named for part in (name, name.split(".")[0])}
        template = "" if self.is_raw else str(self.tokenizer.chat_template)
        for number, row, whole in rows:
            values = json.loads(whole)
            self.names.update(
                name
                for name, value in values.items()
                if name not in used
                and value not in (None, "", [], {})
                and not _INDEX.fullmatch(name)
                and not _sorts_rows(name, value)
            )
            self.names.update(_unread_parts(values, named))
            asked = [one["content"] for one in row.messages if one["role"] != "assistant"]
            if mark := next(filter(None, map(find_place_of_media, asked)), None):
                self.places[mark] += 1
            for message in row.messages:
                self.keys.update(unread_keys(message, template))
            if not self.is_raw and (token := find_control_token(row.messages, self.tokenizer)):
                self.controls[token] += 1
            calls = any(message.get("tool_calls") for message in row.messages)
            self.without_tools += bool(calls and not row.tools and not self.shown.get("tools"))
            yield number, row, whole

    def describe(self, path: Path) -> Iterator[str]:
        """Yield lines, at most one for each kind."""
        parts = [
            f"{what} {', '.join(f'{name} ({n})' for name, n in found.most_common(12))}"
            for what, found in (("columns", self.names), ("keys of messages", self.keys))
            if found
        ]
        if parts:
            yield f"{path}: in no prompt, for so many rows: {', '.join(parts)}" + (
                "" if self.conversations else "; a reward or environment may read columns"
            )
        if self.places:
            mark, _ = self.places.most_common(1)[0]
            yield (
                f"{path}: {sum(self.places.values())} rows have the place of an image or a sound "
                f"({mark:.60}): the policy reads that text, and not what it stands for"
            )
        if self.controls:
            token, _ = self.controls.most_common(1)[0]
            yield (
                f"{path}: {sum(self.controls.values())} rows have control tokens as plain text "
                f"({token}): tokenized as text"
            )
        if self.without_tools:
            yield (
                f"{path}: {self.without_tools} rows have tool calls and no tools, so their prompts "
                "do not show any, as those of an environment of tools do; add a column tools, or "
                "data.template_arguments={tools: [...]}"
            )


@dataclass
class _Refused:
    """Counts rows that the chat template refuses, or raises the first error."""

    bad_rows: str
    count: int = 0
    first: UserError | None = None

    def __call__(self, error: UserError) -> None:
        """Take the error of a row."""
        if self.bad_rows == "error":
            raise UserError(f"{error}; data.bad_rows=skip leaves such rows out") from (
                error.__cause__
            )
        self.count, self.first = self.count + 1, self.first or error

    def describe(self, path: Path, *, rows: int) -> str:
        """Describe the rows that were left out, or raise UserError if no other rows remain."""
        if not rows:
            raise UserError(f"{path} holds no prompts: all of its rows are refused: {self.first}")
        return (
            f"{path}: {self.count} rows that the chat template or training refuses left out "
            f"(data.bad_rows=skip); the first: {self.first}"
        )


@dataclass
class _TooLong:
    """Counts prompts above the maximum length."""

    limit: int
    name: str = "data.max_prompt_tokens"
    rows: int = 0  # prompts that were checked
    count: int = 0
    longest: int = 0
    first: tuple[int, int] = (0, 0)  # its row, and its tokens

    def count_if(self, number: int, length: int) -> bool:
        """Count one prompt; True if it is too long."""
        self.rows += 1
        if length <= self.limit:
            return False
        self.first = self.first if self.count else (number, length)
        self.count, self.longest = self.count + 1, max(self.longest, length)
        return True

    def refuse_or_describe(self, too_long: str, *, path: Path) -> str:
        """Describe the skipped prompts, or raise UserError."""
        if too_long == "skip":
            return (
                f"{path}: {self.count} of {self.rows} prompts have more than "
                f"{self.name}={self.limit} tokens, the longest {self.longest}: left out "
                "(data.too_long=skip)"
            )
        number, length = self.first
        raise UserError(
            f"{name_row(path, number)}: the prompt has {length} tokens, more than "
            f"{self.name}={self.limit} (so have {self.count} of {self.rows} prompts, "
            f"the longest {self.longest}); raise the limit, or leave them out by "
            "data.too_long=skip"
        )


@dataclass(frozen=True)
class PromptMix:
    """The prompts of each step, a function of (sizes, weights, seed, step).

    Every step contains the same number of prompts of each set, in proportion to its weight up to
    rounding. Each set has its own `PromptOrder`; within a step the sets are shuffled together.
    """

    sizes: tuple[int, ...]  # prompts in each set
    weights: tuple[float, ...]
    seed: int

    def indices(self, step: int, count: int) -> list[int]:
        """Indices of the `count` different prompts of `step`, numbered through all sets.

        Raises ValueError if a set is too small for its share, or gets none.
        """
        shares = share(count, self.weights)
        indices: list[int] = []
        start = 0
        for number, (size, part) in enumerate(zip(self.sizes, shares, strict=True)):
            order = PromptOrder(size, derive_seed(self.seed, "prompt mix", number))
            indices += [start + index for index in order.indices(step, part)]
            start += size
        keys = np.random.PCG64(derive_seed(self.seed, "prompts of a step", step)).random_raw(count)
        return [indices[place] for place in np.argsort(keys, kind="stable")]


def share(count: int, weights: Sequence[float]) -> list[int]:
    """`count` divided in the ratio of the weights, rounded by largest remainders.

    ValueError where one gets nothing.
    """
    exact = [count * weight / sum(weights) for weight in weights]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: shares[place] - exact[place])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    if 0 in shares:
        raise UserError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} give a set none of the "
            f"{count} new prompts of a step; raise its weight, or their number "
            "(rollout.prompts_per_step, replay.fresh)"
        )
    return shares


SCHEMA = pa.schema(
    {
        "index": pa.int64(),
        "messages": pa.string(),  # JSON
        "token_ids": pa.list_(pa.int32()),
        "ground_truth": pa.string(),
        "data_source": pa.string(),
        "row": pa.string(),
        "text": pa.string(),
        "tools": pa.string(),  # JSON
        "demonstration": pa.string(),  # JSON of its fields, or null
    }
)


def write_prompts(file: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts to a new file, which takes their place as a `PromptTable`."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        rows: list[dict[str, object]] = []
        for prompt in prompts:
            as_json = {name: json.dumps(getattr(prompt, name)) for name in ("messages", "tools")}
            given = prompt.demonstration and json.dumps(vars(prompt.demonstration))
            rows.append(vars(prompt) | as_json | {"demonstration": given})
            if len(rows) == ROWS_AT_ONCE:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))
                rows = []
        writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))


class _Lazy(Sequence[Prompt]):
    """A sequence whose items are made when they are used."""

    def _make(self, place: int) -> Prompt:
        raise NotImplementedError

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        places = range(len(self))[place]  # raises IndexError
        return self._make(places) if isinstance(places, int) else [self._make(i) for i in places]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._make, range(len(self)))


class PromptTable(_Lazy):
    """The prompts of a file of `write_prompts`."""

    def __init__(self, file: Path) -> None:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._ends = np.cumsum([len(batch) for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _make(self, place: int) -> Prompt:
        number = int(np.searchsorted(self._ends, place, side="right"))
        batch = self._batches[number]
        (row,) = batch.slice(place - int(self._ends[number]) + len(batch), 1).to_pylist()
        row["messages"] = tuple(json.loads(row["messages"]))
        row["tools"] = tuple(json.loads(row["tools"]))
        row["token_ids"] = tuple(row["token_ids"])
        if (given := row["demonstration"]) is not None:
            fields = json.loads(given)
            row["demonstration"] = Demonstration(
                tuple(fields["token_ids"]),
                tuple(map(tuple, fields["observed"])),
                tuple(fields["restarts"]),
            )
        return Prompt(**row)


class JoinedPrompts(_Lazy):
    """Several sets, one after the other, numbered through: `index` names a prompt in a run."""

    def __init__(self, sets: Sequence[Sequence[Prompt]]) -> None:
        self._sets = sets
        self._ends = np.cumsum([len(prompts) for prompts in sets])
        # The last prompt of a set has its largest index, because prompts are in the file's order.
        self._first_indices = np.cumsum([0, *(1 + prompts[-1].index for prompts in sets)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _make(self, place: int) -> Prompt:
        number = int(np.searchsorted(self._ends, place, side="right"))
        prompts = self._sets[number]
        prompt = prompts[place - int(self._ends[number]) + len(prompts)]
        return replace(prompt, index=int(self._first_indices[number]) + prompt.index)
