"""Prompts in a file that every rank maps into its memory, instead of an object for each prompt.

The file is an arrow IPC file. A prompt becomes an object when it is used; what a rank has not used
is in the page cache of its node, once for all ranks.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from megatron_rl.types import Prompt

ROWS_AT_ONCE = 4096  # in memory while a file is written
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
    }
)


def write_prompts(file: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts to a new file, which takes their place as a `PromptTable`."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        rows: list[dict[str, object]] = []
        for prompt in prompts:
            as_json = {name: json.dumps(getattr(prompt, name)) for name in ("messages", "tools")}
            rows.append(vars(prompt) | as_json)
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
