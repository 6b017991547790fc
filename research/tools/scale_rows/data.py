"""Bytes sent to a rank and kept there: responses, prompts, offline rollouts."""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_rl.data.packing import assign_packs
from megatron_rl.data.token_rows import WRITER
from research.tools.scale_rows import Row

TITLE = "Responses, prompts and offline rollouts"
TEXT = """
*Responses*: bytes that ranks receive in a step of 512 prompts x 16 responses of 1 to 32,768 tokens
(uniform, 134 million in all), 8 bytes of token ids and log-probs each, with replicas of 32 ranks
(of 8 at 8 ranks); engines of one rank. `before`, commit 4c2004c: each rank received the padded rows
of all ranks, on its device. `now` is counted from the deliveries of one step. Rank 0 writes files.

*A file of the node*, tried on 2026-11-26 in place of deliveries: every node receives all responses
once, into one file in memory that its ranks map. Bytes are those that enter the busiest node of 8
ranks but the writer's, `before` by deliveries; seconds are those of copying received rows into such
a file, `before` on each rank. On few nodes the file is smaller, on many it is not. Routes cannot be
in it: 94 layers with 8 experts are 752 bytes a token, 101 GB on every node; so deliveries would
stay for them.

*Behavior log-probs*, 4 bytes a token, go from the ranks that score a response to its engine's first
rank and to rank 0; those of a response that waits go on to the ranks that train it.

*Prompts* of 1,200 characters and 200 tokens each, of which a rank uses 512; *offline rollouts* of
4,000 tokens with two columns of log-probs, in one row group: resident memory of a process of its
own, beyond what it takes before. `before` is the same work done as at commit 4c2004c, next to it in
the same run: an object for each prompt, pickled and unpickled once to reach another rank; a file
read whole. *Start-up* is the median of three pairs, in CPU seconds until a second rank has them.
"""
MIB = 2**20
PROMPTS, MANY, OFFLINE_ROWS = 50_000, 1_000_000, (1_000, 13_000)


def count_responses(ranks: int, replica: int) -> dict[str, float]:
    """Count the bytes of a step's token ids and engine log-probs, without texts."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 32768) for _ in range(512 * 16)]
    owners = [index // 16 % ranks for index in range(len(lengths))]  # the engine of the prompt
    generated: Counter[int] = Counter()
    for length, owner in zip(lengths, owners, strict=True):
        generated[owner] += 8 * length
    replicas = ranks // replica
    packs = assign_packs(lengths, budget=2**17, ranks=replicas)
    trained_by = {i: number for number, own in enumerate(packs) for pack in own for i in pack}
    targets = [
        range(trained_by[i] * replica, (trained_by[i] + 1) * replica) for i in range(len(lengths))
    ]
    received: dict[str, float] = {
        "writer": _received([(WRITER,)] * len(lengths), lengths, owners)[WRITER],
        "rank": max(
            (size for rank, size in _received(targets, lengths, owners).items() if rank != WRITER),
            default=0,
        ),
    }
    received |= _into_nodes(targets, lengths, owners)
    scoring = [trained_by[i] * replica + i % replica for i in range(len(lengths))]
    scored = _received([(o, WRITER) for o in owners], lengths, scoring, width=4)
    return {
        **received,
        "before": ranks * max(generated.values()),
        "behavior rank": max(size for rank, size in scored.items() if rank != WRITER),
        "behavior writer": scored[WRITER],
    }


def _received(
    targets: list, lengths: list[int], sources: list[int], *, width: int = 8
) -> Counter[int]:
    """Count the bytes that each rank receives; width: bytes of a token."""
    received: Counter[int] = Counter()
    for to, length, source in zip(targets, lengths, sources, strict=True):
        received.update(dict.fromkeys(set(to) - {source}, width * length))
    return received


NODE = 8


def _into_nodes(targets: list, lengths: list[int], owners: list[int]) -> dict[str, float]:
    """Count the bytes that enter the busiest node: by deliveries, and as one file of the node."""
    by_node: Counter[int] = Counter()
    for rank, size in _received([(*t, WRITER) for t in targets], lengths, owners).items():
        by_node[rank // NODE] += size
    generated: Counter[int] = Counter()
    for length, owner in zip(lengths, owners, strict=True):
        generated[owner // NODE] += 8 * length
    nodes = range(max(owners) // NODE + 1)
    file = 8 * sum(lengths) - min(generated[node] for node in nodes)
    others = [size for node, size in by_node.items() if node]  # the writer's has all
    return {"node": max(others, default=by_node[0]), "node file": file}


def _copy_seconds(size: int) -> float:
    """Measure the CPU seconds of copying received rows of `size` bytes into memory of a file."""
    row = np.ones(2**17, np.uint8)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        memory = np.memmap(file, np.uint8, mode="r+", shape=(size,))
        start = time.process_time()
        for place in range(0, size - len(row), len(row)):
            memory[place : place + len(row)] = row
        return time.process_time() - start


PREPARE = """
import re, sys, time
from pathlib import Path
def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
"""
PROMPT_PROGRAM = (
    PREPARE
    + """
import itertools
from megatron_rl.data.prompts import PromptTable, write_prompts
from megatron_rl.types import Prompt
def prompts(count):
    for number in range(count):
        text = f"{number:06} " * 170
        chat = ({"role": "user", "content": text},)
        yield Prompt(number, chat, tuple(range(1000, 1200)), "1", "x", text)
folder, how, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
write_prompts(folder / "warm.arrow", prompts(4096))
if how == "now":
    write_prompts(folder / "all.arrow", prompts(count))
start = resident("RssAnon")
kept = PromptTable(folder / "all.arrow") if how == "now" else list(prompts(count))
used = [kept[place] for place in range(0, count, count // 512)]
print(resident("RssAnon") - start)
"""
)
START_PROGRAM = (
    PREPARE
    + """
import json, pickle, statistics
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from megatron_rl.data.prompts import PromptTable, write_prompts
from megatron_rl.data.prompts import read_prompts
from megatron_rl.config.sections import ColumnsSection
folder, count = Path(sys.argv[1]), int(sys.argv[2])
file = folder / "prompts.jsonl"
with file.open("w") as lines:
    for number in range(count):
        row = {"prompt": f"{number} " * 200, "answer": str(number), "data_source": "x"}
        lines.write(json.dumps(row) + chr(10))
words = Tokenizer(models.WordLevel({"?": 0} | {str(i): i + 1 for i in range(count)}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?", unk_token="?")
columns = ColumnsSection(answer="answer")
def read():
    return read_prompts(file, tokenizer, max_prompt_tokens=300, columns=columns, template="raw")
def before():
    return len(pickle.loads(pickle.dumps(list(read()))))
def now():
    write_prompts(folder / "start.arrow", read())
    return len(PromptTable(folder / "start.arrow"))
found = {before: [], now: []}
for _ in range(3):
    for work in found:
        start = time.process_time()
        assert work() == count
        found[work].append(time.process_time() - start)
print(*map(statistics.median, found.values()))
"""
)
OFFLINE_PROGRAM = (
    PREPARE
    + """
import pyarrow.parquet as pq
from megatron_rl.rollouts.rollout_files import read_rows
file, how, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
start = resident("VmHWM")
if how == "now":
    total = sum(len(row["token_ids"]) for _, row in read_rows(file, range(count)))
else:
    total = sum(len(row["token_ids"]) for row in pq.read_table(file).to_pylist())
print(resident("VmHWM") - start)
"""
)


def _measure(program: str, *arguments: object) -> list[float]:
    output = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [float(number) for number in output.stdout.split()]


def _write_rollouts(file: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    numbers = [[rng.randint(0, 150_000) for _ in range(4000)] for _ in range(50)]
    logprobs = [[-rng.random() for _ in range(4000)] for _ in range(50)]
    row = {"prompt": "2+2", "response": "4", "reward": 1.0}
    table = pa.Table.from_pylist(
        [
            row | {"token_ids": numbers[i], "rollout_logprobs": logprobs[i],
                   "behavior_logprobs": logprobs[i - 1]}
            for i in range(50)
        ],
        pa.schema({"prompt": pa.string(), "response": pa.string(), "reward": pa.float32(),
                   "token_ids": pa.list_(pa.int32()), "rollout_logprobs": pa.list_(pa.float32()),
                   "behavior_logprobs": pa.list_(pa.float32())}),
    )  # fmt: skip
    table = pa.concat_tables([table] * (count // 50))
    pq.write_table(table, file, compression="zstd", row_group_size=count)


def response_rows() -> Iterator[Row]:
    """Yield the rows of responses, which are counted."""
    for ranks, replica in ((8, 8), (64, 32), (256, 32), (1024, 32)):
        found = count_responses(ranks, replica)
        layout, before = f"replicas of {replica}", found["before"] / MIB
        yield Row("responses: a rank", layout, ranks, before, found["rank"] / MIB, "MiB", "counted")
        yield Row("responses: rank 0 to write", layout, ranks, before, found["writer"] / MIB,
                  "MiB", "counted")  # fmt: skip
        sizes = (found["node"], found["node file"])
        yield Row("responses: a file of the node", layout, ranks, *(size / MIB for size in sizes),
                  "MiB", "counted")  # fmt: skip
        for who, key in (("a rank", "behavior rank"), ("rank 0 to write", "behavior writer")):
            yield Row(f"behavior log-probs: {who}", layout, ranks, "not counted",
                      found[key] / MIB, "MiB", "counted")  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield the rows of responses, prompts and offline rollouts."""
    yield from response_rows()
    found = count_responses(1024, 32)
    before, now = (_copy_seconds(int(found[key])) for key in ("node", "node file"))
    what = "responses: copying into a file of the node"
    yield Row(what, "replicas of 32", 1024, before / NODE, now, "CPU s", "measured")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before, now = _both(PROMPT_PROGRAM, folder, PROMPTS)
        yield Row(f"memory of {PROMPTS:,} prompts", "any", 1, before, now, "MiB", "measured")
        (now,) = _measure(PROMPT_PROGRAM, folder, "now", MANY)
        yield Row(f"memory of {MANY:,} prompts", "any", 1, "not run", now, "MiB", "measured")
        before, now = _measure(START_PROGRAM, folder, PROMPTS // 10)
        what = f"start-up with {PROMPTS // 10:,} prompts"
        yield Row(what, "any", 1, before, now, "CPU s", "measured")
        for count in OFFLINE_ROWS:
            file = folder / "rollouts.parquet"
            _write_rollouts(file, count)
            before, now = _both(OFFLINE_PROGRAM, file, count)
            what = f"peak of reading {count:,} offline rollouts"
            yield Row(what, "any", 1, before, now, "MiB", "measured")


def _both(program: str, path: Path, count: int) -> list[float]:
    return [_measure(program, path, how, count)[0] for how in ("before", "now")]
