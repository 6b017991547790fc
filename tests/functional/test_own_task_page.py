"""The files and commands of docs/own-task.md, and the configs of docs/coming-from.md, work."""

import re
import shlex
import subprocess
import sys

import pytest

from megatron_rl.config import load_config
from megatron_rl.runs.files import read_metrics
from tests.functional.forked_runs import ForkedCommand
from tests.functional.tiny_runs import PLACES, ROOT, TASK, make_task, train

PAGE = (ROOT / "docs" / "own-task.md").read_text()
SMALL = (
    "trainer.steps=1", "rollout.prompts_per_step=8", "rollout.responses_per_prompt=2",
    "trainer.minibatches=1", "eval.samples=1",
)  # fmt: skip

FAR = (  # far from the behavior policy within one step
    "trainer.minibatches=4", "optimizer.warmup_steps=0", "rollout.responses_per_prompt=8",
    "eval.sets={}",
)  # fmt: skip


def commands():
    """The arguments of every `megatron-rl` line of the page, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("megatron-rl ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's folder: its files, the data that its program writes, and the tiny model."""
    make_task()
    clone = tmp_path_factory.mktemp("clone")
    (clone / ".cache").mkdir()
    (clone / ".cache" / "tiny_task").symlink_to(TASK)
    folder = clone / "sort4"
    folder.mkdir()
    for name, text in re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE, re.DOTALL):
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
    return folder


def run(folder, arguments):
    """`megatron-rl ARGUMENTS` in `folder`; its output."""
    output = folder.parent / "output" / f"{abs(hash(tuple(arguments)))}.txt"
    command = ForkedCommand(arguments, output=output, cwd=folder)
    assert command.wait(timeout=600) == 0, command.read()
    return command.read()


def test_reward_is_1_for_right_answer_only(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    from my_rewards import score

    assert score("0567\n", "0567", "") == 1.0
    assert score("2-59", "2359", "") == pytest.approx(0.8 * 3 / 4 + 0.2 * 3 / 4)
    assert score("05670", "0567", "") == pytest.approx((0.8 * 4 + 0.2 * 5) / 5)
    assert score("", "0567", "") == 0.0


@pytest.mark.slow
def test_commands_of_page_run(folder):
    train, rollouts, report, reuse, gspo, wider = commands()
    run(folder, [*train, *SMALL])
    before, step = read_metrics(folder / "runs" / "sort")
    assert 0 < before["eval/heldout/avg@1"] < 1
    assert 0 < step["reward/mean"] < 1 and step["response/length_mean"] <= 8
    assert "truth" in run(folder, rollouts)
    run(folder, report)
    assert (folder / "runs" / "sort" / "report.html").is_file()
    assert "epochs: 4" in run(folder, [*reuse, "--print-config"])
    # With tolerances for long responses the run suggests others, as the page shows.
    output = run(folder, [*gspo, *SMALL, *FAR])
    assert "rejected" in output and "objective.constraint=" in output
    assert "high: 0.27" in run(folder, [*wider, "--print-config"])


def test_config_converted_from_another_trainer_trains_a_step(tmp_path):
    make_task()
    rows = train(  # one step
        f"run.dir={tmp_path}", "run.name=a", "data.epochs=0.001", *SMALL[1:], "eval.sets={}",
        "data.columns={}", PLACES[3], "parallel.tensor=1", "rollout.tensor=1",
        "data.max_prompt_tokens=48",
        "rollout.max_response_tokens=56", "rollout.kv_cache_mib=16", "logging.tensorboard=false",
        "trainer.tokens_per_micro_batch=1024",
        config=ROOT / "examples" / "pnpo" / "from_verl.yaml", places=PLACES[:2],
    )  # fmt: skip
    assert [row["step"] for row in rows if row["step"]] == [1] and rows[-1]["rollout/tokens"] > 0
    kl = {"coefficient": 0.001, "estimator": "k3"}
    config = load_config(tmp_path / "a" / "config.yaml")
    assert (config.objective.name, config.objective.overrides["kl"]) == ("ppo", kl)
    assert (config.data.epochs, config.trainer.steps) == (None, 1)
