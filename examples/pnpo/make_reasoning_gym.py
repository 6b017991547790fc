"""Write prompts of a reasoning-gym task for the verifier megatron_rl.rewards.reasoning_gym:verify.

    python examples/pnpo/make_reasoning_gym.py chain_sum --count 2000 --output chain_sum.parquet
    megatron-rl train --config my.yaml data.train=chain_sum.parquet \\
        reward.verifier=megatron_rl.rewards.reasoning_gym:verify

Needs `pip install reasoning-gym`. The same task, seed, count and settings produce the same file.
"""

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.rewards.reasoning_gym import ASK, open_task


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", help="Name of the reasoning-gym task.")
    parser.add_argument("--count", type=int, default=1000, help="problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--settings", default="{}", help="Settings of the task, as '{\"max_terms\": 4}'"
    )
    parser.add_argument("--output", type=Path, required=True, help="a .parquet file")
    options = parser.parse_args()
    if options.output.suffix != ".parquet":
        sys.exit(f"make_reasoning_gym: --output {options.output}: its name must end in .parquet")
    try:
        dataset = open_task(
            options.task, seed=options.seed, size=options.count, settings=options.settings
        )
    except ValueError as error:
        sys.exit(f"make_reasoning_gym: {error}")
    task = {"name": options.task, "seed": options.seed, "size": options.count}
    rows = []
    for index in range(options.count):
        entry = dataset[index]
        rows.append({
            "data_source": f"reasoning_gym_{options.task}",
            "prompt": [{"role": "user", "content": entry["question"] + ASK}],
            "reward_model": {"ground_truth": str(entry["answer"]), "style": "rule"},
            "task": {**task, "settings": options.settings, "index": index},
        })  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), options.output)
    print(f"{len(rows)} problems of {options.task} in {options.output}")


if __name__ == "__main__":
    main()
