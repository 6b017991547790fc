"""Tests of prompts in a memory-mapped file: the same prompts, and almost none of the memory."""

import dataclasses
import subprocess
import sys

import pytest

from megatron_rl.data.prompt_table import (
    ROWS_AT_ONCE,
    SCHEMA,
    JoinedPrompts,
    PromptTable,
    write_prompts,
)
from megatron_rl.types import Prompt


def _prompt(number: int) -> Prompt:
    return Prompt(
        index=2 * number + 1,
        messages=({"role": "system", "content": "é\n"}, {"role": "user", "content": f"{number}?",
                  "tool_calls": [{"id": 1, "x": None}]}),
        token_ids=tuple(range(number % 5)),
        ground_truth=f'"{number}"',
        data_source="made up",
        row=f'{{"a": {number}}}',
    )  # fmt: skip


def test_prompts_are_read_back_as_they_were(tmp_path):
    prompts = [_prompt(number) for number in range(2 * ROWS_AT_ONCE + 3)]
    write_prompts(tmp_path / "0.arrow", iter(prompts))
    table = PromptTable(tmp_path / "0.arrow")
    assert len(table) == len(prompts)
    assert list(table) == prompts
    assert [table[place] for place in (0, ROWS_AT_ONCE, -1)] == [
        prompts[place] for place in (0, ROWS_AT_ONCE, -1)
    ]
    assert table[5:9:2] == prompts[5:9:2]
    with pytest.raises(IndexError):
        table[len(prompts)]
    (tmp_path / "0.arrow").unlink()
    assert table[7] == prompts[7]  # a file that is open can be read after its removal


def test_file_with_whole_blocks_or_empty_has_no_extra_prompt(tmp_path):
    write_prompts(tmp_path / "0.arrow", map(_prompt, range(ROWS_AT_ONCE)))
    assert len(list(PromptTable(tmp_path / "0.arrow"))) == ROWS_AT_ONCE
    write_prompts(tmp_path / "1.arrow", [])
    assert list(PromptTable(tmp_path / "1.arrow")) == []


def test_every_field_of_prompt_is_in_file():
    assert SCHEMA.names == [field.name for field in dataclasses.fields(Prompt)]


def test_joined_sets_are_numbered_through(tmp_path):
    first, second = [_prompt(0), _prompt(3)], [_prompt(1)]
    write_prompts(tmp_path / "0.arrow", first)
    joined = JoinedPrompts([PromptTable(tmp_path / "0.arrow"), second])
    assert [prompt.index for prompt in joined] == [1, 7, 8 + 3]
    assert [prompt.token_ids for prompt in joined] == [one.token_ids for one in first + second]


PROGRAM = """
import itertools, re, sys
from pathlib import Path
from megatron_rl.data.prompt_table import PromptTable, write_prompts
from megatron_rl.types import Prompt

def prompts():
    for number in range(int(sys.argv[2])):
        text, ids = f"{number} " * 100, tuple(range(1000, 1200))
        chat = ({"role": "user", "content": text},)
        yield Prompt(number, chat, ids, "1", "x", text)

def own_mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) / 1024

file = Path(sys.argv[1])
write_prompts(file, itertools.islice(prompts(), 4096))
PromptTable(file)[0]  # imports and buffers of the libraries
before = own_mib()
write_prompts(file, prompts())
written = own_mib()
table = PromptTable(file)
chosen = [table[place] for place in range(0, len(table), 100)]
if sys.argv[3] == "objects":
    chosen = list(table)
print(written - before, own_mib() - before)
"""


def test_prompts_cost_no_memory_until_they_are_used(tmp_path):
    """20,000 prompts are 150 MiB of objects; writing takes a block, using 1% of them 1.5 MiB."""

    def measure(how: str) -> list[float]:
        arguments = [str(tmp_path / "0.arrow"), "20000", how]
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True
        )
        return [float(one) for one in output.stdout.split()]

    written, used = measure("table")
    assert written < 40
    assert used < 40
    _, objects = measure("objects")
    assert objects > 100
