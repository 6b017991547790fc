"""Checks with a pretrained model of 135 M parameters, one per argument; each prints a row.

    python -m tools.real_model_checks logprobs layouts        two checks, or all without arguments

The model and the questions are those of `examples/pnpo/real_model.sh`, fetched by pip into
`--work`. Checks train by `megatron-rl train`; a second call continues where the first one ended.
Minutes each on two cores; docs/models.md has the results.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.apps.tasks.real_model import draw_questions, make
from megatron_rl.environments import Answer
from megatron_rl.preflight.gguf_models import find_gguf, folder_of_gguf
from megatron_rl.rewards.reasoning_gym import open_task
from megatron_rl.runs.files import read_metrics
from megatron_rl.runtime.versions import hide_unloadable_builds

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "pnpo" / "real_model.yaml"
PLAIN = " Reply with the number only."  # ends the questions of the task
BOXED = " Put the answer in \\boxed{}."
HELD_OUT = "eval.sets={{h: {{path: {}, columns: {{prompt: question, answer: answer}}}}}}"
LAYOUTS = {
    "1": {"data": 1},
    "data 2": {"data": 2},
    "context 2": {"data": 1, "context": 2},
    "pipeline 2": {"data": 1, "pipeline": 2},
    "tensor 3": {"data": 1, "tensor": 3},
    "tensor 3, context 2": {"data": 1, "tensor": 3, "context": 2},
}
GYM = (
    "chain_sum",
    "leg_counting",
    "spell_backward",
    "letter_counting",
    "aiw",
    "gcd",
    "lcm",
    "count_bits",
    "word_sorting",
    "calendar_arithmetic",
    "caesar_cipher",
    "family_relationships",
    "knights_knaves",
    "letter_jumble",
    "number_filtering",
    "prime_factorization",
    "products",
    "simple_equations",
    "syllogism",
    "time_intervals",
    "base_conversion",
    "coin_flip",
    "basic_arithmetic",
    "isomorphic_strings",
    "sentence_reordering",
)


def spread(text: str, ground_truth: str, data_source: str) -> float:
    """Return a reward that differs for different responses, so that every group is trained."""
    return zlib.crc32(text.encode()) / 2**32


class Calculator:
    """Answers `calc(18 + 34)` with the number; the turn without a call is the answer."""

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.answer = row["answer"]

    async def step(self, message: str) -> Answer:
        """Compute, or grade."""
        call = message.strip()
        if not (call.startswith("calc(") and call.endswith(")")):
            right = f"\\boxed{{{self.answer}}}" in message
            return Answer(reward=float(right), done=True, reason="answered")
        parts = call[5:-1].split()
        first, sign, second = parts if len(parts) == 3 else ("", "", "")
        is_number = all(part.isdecimal() and len(part) < 100 for part in (first, second))
        if not is_number or sign not in ("+", "-", "*"):
            return Answer("error: write calc(NUMBER + NUMBER), with +, - or *")
        a, b = int(first), int(second)
        return Answer(str({"+": a + b, "-": a - b, "*": a * b}[sign]))


class Checks:
    """The checks.

    work: folder of model, data and runs.
    dtype: `trainer.dtype` of checks that do not set their own.
    """

    def __init__(self, work: Path, *, dtype: str) -> None:
        self.work = work.absolute()
        self.dtype = dtype
        self.task = self.work / "task"
        make(self.task)
        file = find_gguf(self.task)
        assert file is not None, "the task has the model"
        self.model = folder_of_gguf(file, echo=print)

    def train(self, name: str, *settings: str, config: Path = CONFIG) -> Path:
        """Run a training, or continue it; returns its run directory."""
        fixed = {
            "run.name": name,
            "run.dir": self.work / "runs",
            "model.path": self.model,
            "data.train": self.task / "train.jsonl",
            "eval.sets": "{}",
            "trainer.checkpoint_every": 1000,
            "trainer.dtype": self.dtype,
        }
        self._run(
            "train", str(config), *(f"{key}={value}" for key, value in fixed.items()), *settings
        )
        return self.work / "runs" / name

    def _run(self, *arguments: str) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        }
        command = [sys.executable, "-m", "megatron_rl.cli", *arguments]
        log = self.work / "output.txt"
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            sys.exit(f"real_model_checks: {' '.join(arguments[:2])} failed; see {log}")

    def jsonl(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """Write rows to a file in the work folder."""
        file = self.work / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    def logprobs(self) -> str:
        """Log-probs of 100 conversations: the actor's, the engine's and those of transformers."""
        questions = [{"question": q.text, "answer": "0"} for q in draw_questions(25, seed=2)]
        for task in GYM:
            entry = open_task(task, seed=1, size=1)[0]
            questions.append({"question": entry["question"], "answer": "0"})
        file, lines = self.jsonl("conversations", questions), []
        for dtype in ("float32", "bfloat16"):
            run = self.train(
                f"logprobs_{dtype}",
                f"data.train={file}",
                "data.max_prompt_tokens=256",
                "parallel.data=1",
                "rollout.prompts_per_step=50",
                "rollout.responses_per_prompt=2",
                "rollout.max_response_tokens=64",
                "data.too_long=skip",
                "trainer.steps=1",
                "trainer.minibatches=1",
                "trainer.tokens_per_micro_batch=1024",
                f"trainer.dtype={dtype}",
                "reward.verifier=tools.real_model_checks:spread",
            )
            for name, differences in self._differences(run).items():
                size = sorted(differences)
                mean = sum(size) / len(size)
                lines.append(
                    f"{dtype}, {name}: mean {mean:.2g}, largest {size[-1]:.2g} of {len(size):,} "
                    "tokens"
                )
        return "\n".join(lines)

    def _differences(self, run: Path) -> dict[str, list[float]]:
        """Absolute differences of log-probs of all responses of step 1."""
        import pyarrow.parquet as pq
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        differences: dict[str, list[float]] = {"actor and transformers": [], "engine and actor": []}
        for row in pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist():
            prompt, response = row["prompt_token_ids"], row["token_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            actor, engine = (
                torch.tensor(row[f"{who}_logprobs"]) for who in ("behavior", "rollout")
            )
            differences["actor and transformers"] += (actor - expected).abs().tolist()
            differences["engine and actor"] += (engine - actor).abs().tolist()
        return differences

    def layouts(self) -> str:
        """Two updates in float32 under each layout, compared with those of one process."""
        lines: list[str] = []
        first: dict[str, Any] = {}
        for name, sizes in LAYOUTS.items():
            run = self.train(
                f"layout_{name.replace(', ', '_').replace(' ', '')}",
                *(f"parallel.{key}={value}" for key, value in sizes.items()),
                "trainer.dtype=float32",
                "trainer.steps=1",
                "rollout.prompts_per_step=4",
                "rollout.responses_per_prompt=6",
                "optimizer.warmup_steps=0",
                "reward.verifier=tools.real_model_checks:spread",
            )
            row, weights = read_metrics(run)[-1], load(run / "model")
            if not first:
                first = {"row": row, "weights": weights}
                change = max_difference(weights, load(self.model))
                lines.append(
                    f"{name}: gradient norm {row['grad/norm']:.6f}, largest change of a weight "
                    f"{change:.2e}"
                )
                continue
            norm = abs(row["grad/norm"] / first["row"]["grad/norm"] - 1)
            apart = max_difference(weights, first["weights"])
            lines.append(
                f"{name}: gradient norm differs by {norm:.1e}, a weight by at most {apart:.1e}"
            )
        return "\n".join(lines)

    def export(self) -> str:
        """Greedy responses of transformers and of the engine with an exported folder."""
        import pyarrow.parquet as pq
        import torch
        from transformers import AutoModelForCausalLM

        run = self.train(
            "layout_1",
            "parallel.data=1",
            "trainer.dtype=float32",
            "trainer.steps=1",
            "rollout.prompts_per_step=4",
            "rollout.responses_per_prompt=6",
            "optimizer.warmup_steps=0",
            "reward.verifier=tools.real_model_checks:spread",
        )
        with (self.task / "heldout.jsonl").open(encoding="utf-8") as lines:
            questions = self.jsonl("questions", [json.loads(line) for line in islice(lines, 64)])
        output = self.work / "greedy"
        if not list(output.glob("eval/*.parquet")):
            shutil.rmtree(output, ignore_errors=True)  # of a call that was interrupted
            self._run(
                "eval",
                "--model",
                str(run),
                "--data",
                str(questions),
                "--output",
                str(output),
                "eval.temperature=0",
                "trainer.dtype=float32",
                "rollout.max_response_tokens=32",
            )
        (file,) = (output / "eval").glob("*.parquet")
        model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
        rows, equal = pq.read_table(file).to_pylist(), 0
        for row in rows:
            tokens = torch.tensor([row["prompt_token_ids"]])
            made = model.generate(
                tokens,
                do_sample=False,
                max_new_tokens=32,
                attention_mask=torch.ones_like(tokens),
            )
            equal += made[0, tokens.shape[1] :].tolist() == row["token_ids"]
        return f"{equal} of {len(rows)} greedy responses are equal"

    def lora(self) -> str:
        """Adapters of rank 16 under both pushes: the same rollouts, and the engine's difference."""
        lines = []
        for push in ("merged", "adapters"):
            run = self.train(
                f"lora_{push}",
                "lora.rank=16",
                "lora.alpha=16",
                f"lora.push={push}",
                "trainer.dtype=float32",
                "optimizer.learning_rate=1e-3",
                "optimizer.warmup_steps=0",
                "trainer.steps=3",
                "rollout.prompts_per_step=8",
                "reward.verifier=tools.real_model_checks:spread",
            )
            rows = [row for row in read_metrics(run) if "reward/mean" in row]
            gaps = ", ".join(f"{row['mismatch/logprob_abs_diff_mean']:.1e}" for row in rows)
            norms = ", ".join(f"{row['grad/norm']:.5f}" for row in rows)
            lines.append(f"push {push}: engine against actor {gaps}; gradient norms {norms}")
        return "\n".join(lines)

    def _held_out(self, count: int) -> list[dict[str, Any]]:
        """Return questions of the task's held-out set, none of which `_boxed` draws."""
        with (self.task / "heldout.jsonl").open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, count)]
        return [row | {"question": row["question"].replace(PLAIN, BOXED)} for row in rows]

    def _boxed(self, seed: int, count: int) -> list[dict[str, Any]]:
        with (self.task / "heldout.jsonl").open(encoding="utf-8") as file:
            held = {json.loads(line)["question"] for line in file}
        drawn = (q for q in draw_questions(4 * count, seed=seed) if q.text not in held)
        return [
            {
                "question": q.text.replace(PLAIN, BOXED),
                "answer": str(q.answer),
                "kind": q.kind,
            }
            for q in islice(drawn, count)
        ]

    def sft(self) -> str:
        """300 demonstrations with boxed answers, then RL with the default verifier."""
        demonstrations = self.jsonl(
            "demonstrations",
            [
                {
                    "messages": [
                        {"role": "user", "content": row["question"]},
                        {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"},
                    ]
                }
                for row in self._boxed(3, 300)
            ],
        )
        train, held = (
            self.jsonl("boxed", self._boxed(1, 2000)),
            self.jsonl("boxed_heldout", self._held_out(128)),
        )
        given = (
            HELD_OUT.format(held),
            "eval.every=10",
            "rollout.max_response_tokens=16",
            "reward.verifier=megatron_rl.rewards.math_answer:verify_math_answer",
        )
        run = self.train(
            "sft",
            f"data.train={demonstrations}",
            "data.columns={}",
            "sft={}",
            "objective={name: sft}",
            "rollout.prompts_per_step=30",
            "rollout.responses_per_prompt=1",
            "trainer.minibatches=1",
            "trainer.steps=30",
            "optimizer.learning_rate=1e-4",
            *given,
        )
        after = self.train(
            "after_sft",
            f"model.path={run / 'model'}",
            f"data.train={train}",
            "trainer.steps=20",
            *given,
        )
        return f"sft: {scores(run)}\nthen RL: {scores(after)}"

    def student(self) -> str:
        """The first half of the layers, which learns from the whole model on its own responses."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = self.work / "student"
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            model.model.layers = model.model.layers[: len(model.model.layers) // 2]
            model.config.num_hidden_layers = len(model.model.layers)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.model).save_pretrained(folder)
        run = self.train(
            "student",
            f"model.path={folder}",
            f"model.reference={self.model}",
            "objective.advantage_coefficient=0",
            "objective.kl={coefficient: 1, estimator: forward_kl}",
            "optimizer.learning_rate=2e-4",
            "trainer.steps=20",
            "reward.verifier=tools.real_model_checks:spread",
        )
        losses = [row["loss/kl"] for row in read_metrics(run) if "loss/kl" in row]
        first, last = losses[0], losses[-1]
        return f"KL(teacher, student) {first:.2f}, after {len(losses)} rollout batches {last:.2f}"

    def tool(self) -> str:
        """Conversations with a calculator, after demonstrations of its use."""
        rows = []
        for row in self._boxed(3, 300):
            first, sign, second = expression(row["question"])
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": row["question"]},
                        {"role": "assistant", "content": f"calc({first} {sign} {second})"},
                        {"role": "user", "content": row["answer"]},
                        {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"},
                    ]
                }
            )
        demonstrations = self.jsonl("calls", rows)
        train, held = (
            self.jsonl("boxed", self._boxed(1, 2000)),
            self.jsonl("boxed_heldout", self._held_out(128)),
        )
        run = self.train(
            "tool_sft",
            f"data.train={demonstrations}",
            "data.columns={}",
            "sft={}",
            "objective={name: sft}",
            "data.max_prompt_tokens=96",
            "rollout.prompts_per_step=30",
            "rollout.responses_per_prompt=1",
            "rollout.max_response_tokens=64",
            "trainer.minibatches=1",
            "trainer.steps=30",
            "optimizer.learning_rate=1e-4",
        )
        after = self.train(
            "tool",
            f"model.path={run / 'model'}",
            f"data.train={train}",
            "trainer.steps=10",
            "eval.every=5",
            HELD_OUT.format(held),
            "environment.name=tools.real_model_checks:Calculator",
            "environment.max_turns=3",
            "environment.max_turn_tokens=16",
            "environment.max_context_tokens=192",
            "rollout.max_response_tokens=64",
        )
        return f"with a calculator, after sft on 300 conversations: {scores(after)}"


def expression(text: str) -> tuple[str, str, str]:
    """Return the two numbers of a question and the sign between them."""
    first, second = (
        word for word in text.replace("?", " ").replace(".", " ").split() if word.isdigit()
    )
    signs = {"+": "+", "-": "-", "*": "*", "gets": "+", "gives": "-", "boxes": "*"}
    return first, next(signs[word] for word in text.split() if word in signs), second


def scores(run: Path) -> str:
    """List the held-out scores of a run in the order of its steps."""
    found: Iterator[tuple[int, str, float]] = (
        (row["step"], key, value)
        for row in read_metrics(run)
        for key, value in row.items()
        if key.startswith("eval/h/avg@")
    )
    return ", ".join(f"{value:.1%} at step {step}" for step, _, value in found)


def load(folder: Path) -> dict[str, Any]:
    """Load all tensors of a folder."""
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def max_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two models' weights."""
    assert one.keys() == other.keys(), "models with the same tensors"
    return max(float((one[key].float() - other[key].float()).abs().max()) for key in one)


CHECKS = ("logprobs", "layouts", "export", "lora", "sft", "student", "tool")


def main() -> None:
    """Run the checks named by the arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--work", type=Path, default=Path(".cache/real_model_checks"))
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="trainer.dtype of sft, student and tool; float32 is faster on a processor without "
        "bfloat16 instructions",
    )
    options = parser.parse_args()
    if unknown := sorted({*options.checks} - {*CHECKS}):
        parser.error(f"unknown check {unknown[0]}; choose from {', '.join(CHECKS)}")
    hide_unloadable_builds()
    checks = Checks(options.work, dtype=options.dtype)
    for name in options.checks or CHECKS:
        print(f"{name}\n{getattr(checks, name)()}", flush=True)


if __name__ == "__main__":
    main()
