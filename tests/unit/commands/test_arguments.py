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
