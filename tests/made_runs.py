"""Run directories without training: random numbers in the files that a run writes."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import PHASES, append_row
from megatron_rl.types import REPLACES_HISTORY, GradeResult, Prompt, Response, Rollout

EPOCHS, LENGTH, GROUP = 4, 40, 4
HOSTILE = (
    "</script><script>window.hostile = 1</script>", '<img src=x onerror="window.hostile = 1">',
    "&lt;b&gt; & \"'", "\u202egnihton\u2069", "\x1b[31m", "\n", "-->", "\u2028", "é", "{{7*7}}",
)  # fmt: skip
WORDS = [*HOSTILE, *(f" w{n}" for n in range(30))]
OBSERVED = 3  # the token of observations in conversations


def make_run(
    folder: Path, *, objective: str = "pnpo", seed: int = 1, steps: int = 14, traced: int = 4,
    sets: tuple[str, ...] = ("heldout",), best: float = 1.0, turns: int = 1, **settings,
) -> Path:  # fmt: skip
    """Write a run of random numbers; `best` is its highest reward, `settings` config sections."""
    draw = random.Random(f"{folder.name} {seed}")
    folder.mkdir(parents=True)
    wide = {"name": objective} | (
        {"constraint": {"low": 0.02, "high": 0.027}} if objective == "pnpo" else {}
    )
    config = {
        "seed": seed, "run": {"name": folder.name, "dir": str(folder.parent)}, "objective": wide,
        "model": {"path": "a model"}, "trainer": {"epochs": EPOCHS, "minibatches": 4},
    } | settings  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": 0} | {f"eval/{name}/avg@8": draw.uniform(0.2, 0.4) for name in sets}]
    fractions = {"truncated": 0.125, "time_limit": 0.01, "failed": 0.0}  # of each evaluation
    for step in range(1, steps + 1):
        rows.append(_row(draw, step, sets if step % 2 == 0 else ()))
        rows[-1]["reward/mean"] *= best
    for row in rows:
        evaluated = [key.rpartition("/")[0] for key in row if key.startswith("eval/")]
        row |= {f"{one}/{kind}_fraction": x for one in evaluated for kind, x in fractions.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = RunDirectory(folder)
    for row in _timeline(rows[1:], has_engine_ranks=objective == "gspo"):
        append_row(directory.timeline_file, row)
    if traced:
        _write_tokenizer(folder / "model")
        for step in range(1, steps + 1):
            _write_step(
                directory, np.random.default_rng([seed, step]), step, traced, seed, best, turns
            )
    return folder


def _row(draw: random.Random, step: int, sets: tuple[str, ...]) -> dict:
    row = {
        "step": step, "reward/mean": min(1.0, 0.3 + 0.04 * step + draw.uniform(-0.08, 0.08)),
        "policy/entropy": draw.uniform(0.2, 0.8), "response/length_mean": draw.uniform(30, 40),
        "gate/acceptance": draw.uniform(0.8, 1), "grad/norm": draw.uniform(0.1, 1),
        "ratio/prefix_mean_log_std": draw.uniform(0.01, 0.1),
        "gate/rejected_below_positive": None if step == 3 else draw.uniform(0, 0.1),
        "rollout/tokens": draw.randint(9000, 11000), "train/updates": 16 - (step == 4),
    } | {f"eval/{name}/avg@8": draw.uniform(0.3, 0.9) for name in sets}  # fmt: skip
    row |= {f"time/{phase}": draw.uniform(0.1, 2) for phase in PHASES if phase != "reference"}
    row["time/step"] = sum(value for key, value in row.items() if key.startswith("time/"))
    for epoch in range(1, EPOCHS + 1):
        for tenth in range(1, 11):
            spread = 0.01 * epoch / math.sqrt(tenth)
            row |= {
                f"epoch_{epoch}/by_fraction/{tenth / 10:.1f}/{name}": value
                for name, value in (
                    ("acceptance", draw.uniform(0.7, 1)), ("prefix_mean_log_std", spread),
                    ("prefix_mean_log_q05", -1.6 * spread), ("prefix_mean_log_q95", 1.7 * spread),
                    ("prefix_mean_log_median", draw.uniform(-0.1, 0.1) * spread),
                )
            }  # fmt: skip
    return row


def _timeline(rows: list[dict], *, has_engine_ranks: bool) -> Iterator[dict]:
    """The phases of each step one after the other; engines generate until the trainers sync."""
    start = 1.8e9
    for row in rows:
        seconds = {phase: row.get(f"time/{phase}", 0.0) for phase in PHASES}
        ends = list(itertools.accumulate(seconds.values()))
        own = [
            [phase, end - seconds[phase], seconds[phase]]
            for phase, end in zip(PHASES, ends, strict=True)
        ]
        sync = next(one for one in own if one[0] == "sync")
        groups = {"trainers": own, "engines": [["rollout", -0.1, sync[1] + 0.1], sync]}
        ranks = groups if has_engine_ranks else {"all ranks": own}
        yield {"step": row["step"], "start": start, "seconds": ends[-1], "ranks": ranks}
        start += ends[-1]


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir()
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[-1]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def in_turns(response: Response, turns: int) -> Response:
    """The same sampled tokens as a conversation, with three observed tokens between its turns.

    The last of several observations replaces everything before it.
    """
    tokens, observed, messages = [], [], []
    parts = np.array_split(response.token_ids, turns)
    for turn, part in enumerate(parts):
        if turn:
            observed.append((len(tokens), len(tokens) + 3))
            tokens += [OBSERVED] * 3
            messages.append({"role": "user", "content": WORDS[OBSERVED] * 3})
        tokens += part.tolist()
        text = "".join(WORDS[token] for token in part)
        messages.append({"role": "assistant", "content": text})
    if turns > 2:
        messages[-2][REPLACES_HISTORY] = True
    return replace(
        response, token_ids=np.array(tokens, np.int32), text=text, observed=tuple(observed),
        restarts=tuple(first for first, _ in observed[1:][-1:]), messages=tuple(messages),
    )  # fmt: skip


def _write_step(
    directory: RunDirectory,
    draw: np.random.Generator,
    step: int,
    traced: int,
    seed: int,
    best: float,
    turns: int,
) -> None:
    """Two groups; of the second as many responses as are traced have log-probs at every epoch."""
    directory.rollouts.mkdir(exist_ok=True)
    rollouts, traces = [], {}
    for index in (2 * step, 2 * step + 1):
        prompt = Prompt(
            index,
            ({"role": "user", "content": f"What {seed}? {HOSTILE[0]} {HOSTILE[3]}"},),
            (1,),
            "7",
            "toy",
            text=f"<user>What {seed}? {HOSTILE[0]} {HOSTILE[3]}<end>",
        )
        for sample in range(GROUP):
            length = int(draw.integers(LENGTH // 2, LENGTH + 1))
            ids = draw.integers(0, len(WORDS), length)
            before = -draw.exponential(0.5, length).astype(np.float32)
            reward = best * (sample % 2)
            text = "".join(WORDS[token] for token in ids)
            response = Response(
                index,
                sample,
                ids.astype(np.int32),
                before + np.float32(1e-6),
                text,
                "stop",
                step - 1,
            )
            if turns > 1:
                response = in_turns(response, turns)
            response = replace(response, behavior_logprobs=before)
            rollouts.append(Rollout(prompt, response, GradeResult(reward, "equal", HOSTILE[1])))
            if index % 2 and sample < traced:
                moved = 0.05 * np.arange(EPOCHS)[:, None] * draw.standard_normal((EPOCHS, length))
                traces[len(rollouts) - 1] = (before + moved).astype(np.float32)
    directory.write_rollouts(
        step,
        rollouts,
        advantages=[r.grade_result.reward - 0.5 for r in rollouts],
        turn_advantages=[  # the last turns of right answers have negative ones
            np.array([r.grade_result.reward - 0.5 - turn for turn in range(turns)])
            for r in rollouts
            if turns > 1
        ],
        sampled=[place >= GROUP for place in range(len(rollouts))],
    )
    directory.write_traces(step, traces)
