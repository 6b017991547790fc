"""Several training runs whose ranks are forked from one process that has imported everything.

    python -m tests.functional.preloaded < [{"ranks": 2, "arguments": ["train", ...]}, ...]

Seven seconds of imports are spent once instead of in every rank. Prints a JSON list of statuses.
"""

import importlib
import json
import os
import sys

from megatron_rl.processes import prepare_environment, quiet_libraries
from tests.ranks import find_free_port

MODULES = (
    "torch", "transformers", "megatron_rl.trainer.build", "vllm", "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
)  # fmt: skip


def run(ranks: int, arguments: list[str]) -> int:
    """The highest status of the ranks of one run; when one fails the others are ended."""
    port = find_free_port()
    children = [_fork(rank, ranks, port, arguments) for rank in range(ranks)]
    statuses = []
    while len(statuses) < ranks:
        child, code = os.wait()
        children.remove(child)
        statuses.append(os.waitstatus_to_exitcode(code))
        if statuses[-1]:
            for one in children:
                os.kill(one, 9)
    return max(abs(status) for status in statuses)


def _fork(rank: int, ranks: int, port: int, arguments: list[str]) -> int:
    if child := os.fork():
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    from megatron_rl.cli import main

    try:
        main(arguments)
    finally:
        os._exit(1)  # a run leaves by itself


if __name__ == "__main__":
    runs = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # what the runs say goes to standard error
    prepare_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    quiet_libraries()
    for module in MODULES:
        importlib.import_module(module)
    os.write(answer, json.dumps([run(**each) for each in runs]).encode())
