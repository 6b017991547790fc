"""docs/configuration.md: it is what the tool makes of the config, and it names every key."""

from megatron_rl.config import Config, valid_keys
from tools.configuration_page import PAGE, page


def test_page_equals_output_of_tool():
    assert PAGE.read_text() == page(), "run python tools/configuration_page.py"


def test_every_key_has_row_with_its_default_and_its_rule():
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    output = {row[0].strip("| `"): row[1:] for row in rows}
    # A section within a section is a key of its own, next to those in it.
    within = {"data.columns", "data.mix", "data.mix.columns", "eval.columns", "eval.sets",
              "eval.sets.columns", "logging.mlflow", "logging.trackio", "logging.wandb",
              "shaping.overlong"}  # fmt: skip
    assert set(output) == set(valid_keys(Config)) | within
    assert output["optimizer.beta1"][:2] == ["`0.9`", "number ≥ 0.0, < 1.0"]
    assert output["rollout.responses_per_prompt"][:2] == ["`8`", "integer ≥ 2"]
    assert output["run.resume"][:2] == ["`never`", "`never` or `auto`"]
    assert output["run.name"][:2] == [
        "`null`",
        "a file name of letters, digits, `.`, `_` and `-` or `null`",
    ]
    assert all(row[-1].removesuffix("|").strip() for row in output.values())
