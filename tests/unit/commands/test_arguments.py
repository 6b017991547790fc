"""Error messages for unknown arguments, also on a terminal that is not UTF-8."""

import os
import subprocess
import sys

import pytest

from megatron_rl.cli import main


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (
            ["train", "--config", "c", "--steps=5"],
            "'--steps=5'; settings are given as trainer.steps=5",
        ),
        (["train", "--config", "c", "--seed"], "'--seed'; settings are given as seed=VALUE"),
        (["train", "--config", "c", "--lr=1"], "'--lr=1'; settings are given as key=value, for ex"),
        (["doctor", "run", "seed=1"], "unknown argument 'seed=1'"),
    ],
)
def test_unknown_option_suggests_setting(capsys, words, output):
    with pytest.raises(SystemExit) as end:
        main(words)
    messages = capsys.readouterr().err
    assert end.value.code == 2 and output in messages
    assert (
        messages.startswith("megatron-rl: error: ") and messages.count("\n") == 1
    )  # no other's usage


def test_count_below_one_is_rejected(capsys):
    with pytest.raises(SystemExit) as end:
        main(["rollouts", "run", "--count", "0"])
    assert end.value.code == 2
    assert "--count: '0' must be a whole number, 1 or more" in capsys.readouterr().err


def test_terminal_that_is_not_utf8_shows_escapes(tmp_path):
    """`--print-config` writes the text of a config to standard output, which is ASCII here."""
    config = tmp_path / "größe.yaml"
    config.write_text("data.system_prompt: 'Größe → 5'\nmodel.path: m\ndata.train: t\n",
                      encoding="utf-8")  # fmt: skip
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(config),
               "--print-config"]  # fmt: skip
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"system_prompt: Gr\\xf6\\xdfe \\u2192 5\n" in done.stdout
