"""Common beginnings computed once, against whole sequences, padded transformers and TRL.

    python -m tools.benchmarks.shared_prompts [--cases 1024/64 ...] [--repeats 3] [--hidden 576]

A model with random weights on one CPU thread. Every case and way runs in a process of its own: the
log-probs of the behavior policy and one update, the processor seconds of the fastest repeat, and
how much the process's largest memory grew. The ways take turns, so that a busy machine slows each.
Two bounds: the ratio of rows, which all linear layers have, and that of all operations, since a
response still attends to each token of its prompt. The head computes the same tokens both ways.
`TRL` is TRL's own trainer, which `python tools/benchmarks/against_trl.py install` installs.
With --ranks, two ranks of context parallelism count the bytes and messages of both ways instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.types import GradeResult, Prompt, Response, Rollout

# name: (tokens of the prompt, of each response, responses)
GROUPS = {
    "1024/64": (1024, 64, 8),
    "1024/256": (1024, 256, 8),
    "512/512": (512, 512, 8),
    "128/1024": (128, 1024, 8),
    "150/4000": (150, 4000, 4),
    "50/16": (50, 16, 64),
}
CASES = (*GROUPS, "agent", "replaced")
WAYS = ("whole", "shared", "transformers", "TRL")
VOCABULARY, LAYERS = 2048, 4


def make_rollouts(case: str) -> list[Rollout]:
    """Build one group: plain, of an agent's conversations, or with histories replaced twice."""
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(0, VOCABULARY, count).tolist()

    prompt_tokens, length, count = GROUPS.get(case, (4000 if case == "agent" else 400, 0, 8))
    prompt = Prompt(0, (), tuple(tokens(prompt_tokens)), "", "")
    rollouts = []
    for sample in range(count):
        ids, observed, restarts = tokens(length), [], []
        if case == "agent":  # three turns of 60 tokens, each answered with 120
            for turn in range(3):
                ids += tokens(60)
                observed += [(len(ids), len(ids) + 120)] * (turn < 2)
                ids += tokens(120 * (turn < 2))
        if case == "replaced":  # each history keeps the prompt and the first turn
            first = tokens(200)
            for turn in range(3):
                if turn:
                    restarts.append(len(ids))
                    observed.append((len(ids), len(ids) + prompt_tokens + 250))
                    ids += [*prompt.token_ids, *first, *tokens(50)]
                ids += tokens(200) if turn else first
        own = len(ids) - sum(end - start for start, end in observed)
        response = Response(
            0, sample, np.array(ids, np.int32), np.zeros(own, np.float32), "", "stop", 0,
            observed=tuple(observed), restarts=tuple(restarts),
        )  # fmt: skip
        rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
    return rollouts


def make_model(folder: Path, hidden: int) -> None:
    """Write a random Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = hidden // 64
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=LAYERS, num_attention_heads=heads, num_key_value_heads=heads // 3 or 1,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_actor(rank: int, ranks: int, folder: str, case: str, way: str, repeats: int) -> str:
    """Score and update; report seconds, MiB, rows, packs, and what a rank receives."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.objectives import build_objective

    torch.set_num_threads(1)
    topology = groups.initialise(context=ranks)
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=1e-6), overlap_reduction=False,
        share_prompts="auto" if way == "shared" else False,
    )  # fmt: skip
    actor = MegatronActor(folder, topology=topology, settings=settings)
    rollouts = make_rollouts(case)
    (minibatch,) = plan_minibatches(
        rollouts, torch.linspace(-1, 1, len(rollouts)), minibatches=1,
        tokens_per_micro_batch=16384, topology=topology, sharing=actor.sharing,
    )  # fmt: skip
    packs, objective = minibatch.micro_batches, build_objective("pnpo")
    before, best, traffic = _memory(), float("inf"), Traffic()
    for _ in range(repeats):
        start = time.process_time()
        with traffic:
            for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
                pack.behavior_logprobs = logprobs
            actor.update(minibatch, objective)
        best = min(best, time.process_time() - start)
    report = {
        "seconds": best, "MiB": _memory() - before, "rows": sum(len(p.tokens) for p in packs),
        "cost": sum(_cost(pack, actor.shape) for pack in packs),
        "packs": len(packs), "bytes": traffic.bytes // repeats,
        "messages": traffic.messages // repeats,
    }  # fmt: skip
    return json.dumps(report)


def _cost(pack: Any, shape: Any) -> float:
    """Count the operations of a pack's layers, in rows of their linears."""
    from megatron_rl.actor.sharing import ATTENTION_RATE, operations_of_a_row

    pairs_per_row = operations_of_a_row(shape) * ATTENTION_RATE
    parents = pack.parents or (-1,) * len(pack.sequence_lengths)
    used = pack.used or pack.sequence_lengths
    ends: list[int] = []
    pairs = 0.0
    for parent, length in zip(parents, used, strict=True):
        depth = ends[parent] if parent >= 0 else 0
        ends.append(depth + length)
        pairs += length * (depth + length / 2)
    return len(pack.tokens) + pairs / pairs_per_row


class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Count of this rank's collectives, and of the bytes that it gives to them."""

    bytes = messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.messages += 1
            flat = torch.utils._pytree.tree_leaves(args)
            self.bytes += sum(x.nbytes for x in flat if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def split_texts(case: str) -> list[tuple[list[int], list[int]]]:
    """Return each sequence's prompt and the tokens behind it; a replaced history begins another."""
    texts = []
    for one in make_rollouts(case):
        prompt, rest = list(one.prompt.token_ids), one.response.token_ids.tolist()
        bounds = [0, *one.response.restarts, len(rest)]
        pieces = [rest[a:b] for a, b in itertools.pairwise(bounds)]
        texts += [(prompt, pieces[0]), *((prompt, piece[len(prompt) :]) for piece in pieces[1:])]
    return texts


def run_trl(folder: str, case: str, repeats: int) -> str:
    """Run the passes by TRL's own trainer."""
    from tools.benchmarks.against_trl import TRL

    texts = Path(folder) / "texts.json"
    texts.write_text(json.dumps(split_texts(case)), encoding="utf-8")
    program = Path(__file__).with_name("trl_passes.py")
    command = [str(TRL / "bin" / "python"), str(program), folder, str(texts), str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def run_transformers(rank: int, ranks: int, folder: str, case: str, way: str, repeats: int) -> str:
    """Run the same passes by transformers on padded whole sequences, as TRL computes them."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [prompt + rest for prompt, rest in split_texts(case)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    keep = longest - min(len(prompt) for prompt, _ in split_texts(case)) + 1

    def logprobs() -> torch.Tensor:
        logits = model(ids, attention_mask=mask, logits_to_keep=keep).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, ids[:, 1 - keep :, None])

    before, best = _memory(), float("inf")
    for _ in range(repeats):
        start = time.process_time()
        with torch.no_grad():
            logprobs()
        logprobs().mean().backward()
        best = min(best, time.process_time() - start)
    return json.dumps({"seconds": best, "MiB": _memory() - before, "rows": ids.numel()})


def main() -> None:
    """Print a table."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.hidden)
        for case in arguments.cases:
            found = {}
            for way in arguments.ways:
                options, ranks = (folder, case, way, arguments.repeats), arguments.ranks
                if way == "TRL":
                    found[way] = json.loads(run_trl(folder, case, arguments.repeats))
                    continue
                is_ours = way != "transformers"
                run, count = (run_actor, ranks) if is_ours else (run_transformers, 1)
                found[way] = json.loads(run_ranks(run, count, *options, timeout=3000)[0])
            base = found.get("whole")
            for way, one in found.items():
                line = f"{case:>9} {way:<12} " + "  ".join(
                    f"{key} {value:.2f}" if key == "seconds" else f"{key} {value:,.0f}"
                    for key, value in one.items()
                    if key != "cost"
                )
                if base and way == "shared":
                    gain, *bounds = (base[key] / one[key] for key in ("seconds", "rows", "cost"))
                    line += f"  gain {gain:.2f} of {bounds[0]:.2f} (operations: {bounds[1]:.2f})"
                print(line, flush=True)


if __name__ == "__main__":
    main()
