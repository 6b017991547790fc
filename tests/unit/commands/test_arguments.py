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
        (["train", "--config", "c", "--foo=1"], "'--foo=1'; settings are given as key=value, for"),
        (["train", "c", "--num_generations", "8"], "for TRL's num_generations set rollout.respons"),
        (["train"], "the following argument is required: CONFIG (or --config)"),
        (["train", "b.yml", "--config", "a"], "--config is given twice, as a and as b.yml; give"),
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


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["launch", "c", "--cluster", "a", "--cluster=b"], "--cluster: given twice, as a and as b"),
    ],
)
def test_option_that_is_given_twice_is_refused(capsys, words, output):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and output in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run=1.yaml", "--print-config", "seed=3"],
        ["train", "run.yaml", "seed=3", "--print-config"],
        ["train", "seed=3", "run.yaml", "--print-config"],
    ],
)
def test_config_may_be_given_without_its_option(capsys, monkeypatch, tmp_path, words):
    for name in ("run.yaml", "run=1.yaml"):
        (tmp_path / name).write_text("model: {path: m}\ndata: {train: t}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0 and capsys.readouterr().out.startswith("seed: 3\n")


def test_count_below_one_is_rejected(capsys):
    with pytest.raises(SystemExit) as end:
        main(["rollouts", "run", "--count", "0"])
    assert end.value.code == 2
    assert "--count: '0' must be a whole number, 1 or more" in capsys.readouterr().err


PROGRAM = """
import atexit, locale
atexit.register(lambda: print(locale.getpreferredencoding(False).upper(), "\u2192"))
from megatron_rl.cli import main
main()
"""


def test_locale_that_is_not_utf8_concerns_only_the_terminal():
    """Libraries read their own files in the locale's encoding; the terminal shows escapes."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", PROGRAM.replace("\u2192", r"\u2192"), "--version"]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"UTF-8 \\u2192\n")
