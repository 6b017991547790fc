"""What is said of arguments that are none."""

import pytest

from megatron_rl.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "--config", "c", "--steps=5"],
            "'--steps=5'; settings are given as trainer.steps=5",
        ),
        (["train", "--config", "c", "--seed"], "'--seed'; settings are given as seed=VALUE"),
        (["train", "--config", "c", "--lr=1"], "'--lr=1'; settings are given as key=value, as tra"),
        (["doctor", "run", "seed=1"], "unknown argument 'seed=1'"),
    ],
)
def test_an_option_that_is_a_setting_is_answered_by_the_setting(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(words)
    told = capsys.readouterr().err
    assert end.value.code == 2 and said in told
    assert told.startswith("megatron-rl: error: ") and told.count("\n") == 1  # no other's usage
