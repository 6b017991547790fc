"""Write prompt files of DAPO-Math-17k, AMC 2023, AIME 2024 and 2025 in DAPO-Math-17k's schema.

Needs a network and `pip install datasets`. Without a network it prints the files to download on
another machine; then pass the file:

    python tools/prepare_data.py --output data                            # all four
    python tools/prepare_data.py --output data amc23=amc/test.parquet     # one set, from a file

Problems are distinct in the output (the published DAPO-Math-17k repeats each about a hundred
times). For the other sets, a request for a boxed answer is appended. Existing files are kept.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ASK = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


class Source(NamedTuple):
    """Source of a published set, and its columns."""

    repository: str
    split: str
    prompt: str
    answer: str
    file: str  # output file name


SOURCES = {
    "dapo": Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt",
                   "reward_model.ground_truth", "dapo-math-17k.parquet"),
    "amc23": Source("math-ai/amc23", "test", "question", "answer", "amc23.parquet"),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer", "aime24.parquet"),
    "aime25": Source("math-ai/aime25", "test", "problem", "answer", "aime25.parquet"),
}  # fmt: skip


def prepare(name: str, source: Path, output: Path) -> int:
    """Write the set with this name to `output`; return the number of problems."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_rl.config.sections import ColumnsSection
    from megatron_rl.data.rows import parse_row, read_rows

    columns = ColumnsSection(prompt=SOURCES[name].prompt, answer=SOURCES[name].answer)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, plain in read_rows(source, columns):
        row = parse_row(plain, columns, path=source, number=number)
        messages = [dict(message) for message in row.messages]
        if name != "dapo":
            messages[-1]["content"] = messages[-1]["content"].strip() + ASK
        rows.setdefault(
            (messages[-1]["content"], row.ground_truth),
            {
                "data_source": name if name != "dapo" else row.data_source,
                "prompt": messages,
                "ability": "MATH",
                "reward_model": {"ground_truth": row.ground_truth, "style": "rule"},
                "extra_info": {"index": str(number)},
            },
        )
    partial = output.with_name(f".{output.name}.partial")
    pq.write_table(pa.Table.from_pylist(list(rows.values())), partial)
    os.replace(partial, output)
    return len(rows)


def main() -> None:
    """Run the command line; exit with 1 if a set could not be written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("data"))
    parser.add_argument("sets", nargs="*", metavar="NAME[=FILE]",
                        help=f"of {', '.join(SOURCES)}; default: all")  # fmt: skip
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "0")
    wanted = dict(one.partition("=")[::2] for one in options.sets or SOURCES)
    if unknown := wanted.keys() - SOURCES.keys():
        sys.exit(f"prepare_data: {', '.join(unknown)}: there are {', '.join(SOURCES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, file in wanted.items():
        source, output = SOURCES[name], options.output / SOURCES[name].file
        if output.exists() and not file:
            print(f"{name}: already in {output}")
            continue
        try:
            count = prepare(name, Path(file or f"hf:{source.repository}:{source.split}"), output)
            print(f"{name}: {count} problems in {output}")
        except ValueError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
            if file:
                continue
            folder = source.repository.split("/")[1]
            advice = [
                "  on a machine with a network: "
                f"hf download {source.repository} --repo-type dataset --local-dir {folder}",
                f"  then here, with the .parquet or .jsonl file of the split {source.split}: "
                f"python tools/prepare_data.py --output {options.output} {name}=FILE",
            ]
            print("\n".join(advice), file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
