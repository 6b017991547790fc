"""Runs with agents of other virtual environments, which are installed for them (what is installed
here and suits them is shared: resolving and unpacking all of it would take minutes).

OpenAI's client, environments of verifiers 0.1 and 0.4 and of OpenEnv, all unmodified: each trains
two rollout batches. verifiers 0.4 tokenizes itself and asks for tokens.
"""

import fcntl
import functools
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.functional.conversation_runs import CONFIG
from tests.functional.test_conversations import save_model
from tests.functional.tiny_runs import ROOT, train

pytestmark = pytest.mark.slow
# Virtual environments: those of one have packages that exclude each other's releases.
PACKAGES = {
    "OUTSIDE_PYTHON": ("openai==3.54.0", "verifiers==0.1.14"),
    "LATER_OUTSIDE_PYTHON": ("verifiers==0.4.0",),
    "OPENENV_PYTHON": ("openenv==0.10.0",),
}
AGENTS = {"Client": "OUTSIDE_PYTHON", "Verifiers": "OUTSIDE_PYTHON",
          "Verifiers4": "LATER_OUTSIDE_PYTHON", "OpenEnv": "OPENENV_PYTHON"}  # fmt: skip
HOME = ROOT / ".cache" / "outside_agents"
SETTINGS = (
    "rollout.prompts_per_step=1", "rollout.responses_per_prompt=2",
    "rollout.max_response_tokens=12", "rollout.kv_cache_mib=8", "data.max_prompt_tokens=24",
    "environment.max_context_tokens=96", "environment.max_turns=3",
    "environment.max_turn_tokens=4", "environment.time_limit_seconds=300",
    "environment.on_error=zero",
    "trainer.steps=2", "trainer.epochs=2", "trainer.minibatches=1", "eval.sets={}",
    "objective.entropy_coefficient=0.01", "logging.tensorboard=false",
)  # fmt: skip


@functools.cache
def interpreter(name):
    """The interpreter of agents, and why there is none; made once, then found."""
    home = HOME / name.lower()
    python = home / "bin" / "python"
    HOME.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            (site,) = home.glob("lib/python*/site-packages")  # comes before the shared folders
            shared = (path for path in sys.path if path.endswith("-packages"))
            (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
            install = [python, "-m", "pip", "install", "-q", "--no-compile",
                       "--no-warn-conflicts", *PACKAGES[name]]  # fmt: skip
            made = subprocess.run(install, check=False, capture_output=True, text=True, timeout=600)
            if made.returncode:
                problem = (made.stderr.strip().splitlines() or ["no reason"])[-1]
                return None, f"cannot install {' and '.join(PACKAGES[name])}: {problem}"
            (home / "complete").touch()
    return python, ""


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_of_another_environment_is_trained(tmp_path, monkeypatch, agent):
    variable = AGENTS[agent]
    python, problem = interpreter(variable)
    if python is None:
        pytest.skip(problem)
    monkeypatch.setenv(variable, str(python))
    save_model(tmp_path / "model")
    prompt = [{"role": "user", "content": "Go."}]
    model = str(tmp_path / "model")  # for an agent that tokenizes
    rows = [{"prompt": prompt, "answer": str(n), "model": model} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, *steps = train(
        f"run.dir={tmp_path}", "run.name=a", *SETTINGS, f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl", "data.columns={prompt: prompt, answer: answer}",
        f"environment.name=tests.functional.outside_agents:{agent}",
        f"workers.variables=[{variable}]", config=CONFIG, places=(),
    )  # fmt: skip
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["ratio/first_minibatch_max_deviation"] == 0.0
        assert row["rollout/weight_version"] == row["step"] - 1
        assert row["conversation/turns_mean"] > 1
        responses = pq.read_table(tmp_path / "a" / "rollouts" / f"step_00000{row['step']}.parquet")
        for response in responses.to_pylist():
            turns = [one["content"] for one in json.loads(response["messages"])
                     if one["role"] == "assistant"]  # fmt: skip
            if agent == "Verifiers4":  # decodes the tokens itself, without special ones
                turns = [turn.replace("<|pad|>", "") for turn in turns]
            if not all(turns):  # verifiers takes no empty turn
                continue
            # The agent counted the letters of all turns: it has read what the policy wrote.
            assert response["reward"] == sum(map(len, turns)) and len(turns) == 3
            assert response["reason"] == "agent ended"
