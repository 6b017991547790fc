"""The pages of settings and metrics are what the tool makes; the first names every key."""

import re

from megatron_rl.config import Config, valid_keys
from tools.reference_pages import CONFIGURATION, METRICS, configuration_page, metrics_page


def test_pages_equal_output_of_tool():
    for page, text in ((CONFIGURATION, configuration_page()), (METRICS, metrics_page())):
        assert page.read_text() == text, "run python tools/reference_pages.py"


def test_every_key_has_its_default_its_rule_and_a_text():
    rows = re.findall(r"^- `([\w.]+)(.*?): (.*\S)$", configuration_page(), re.MULTILINE)
    output = {key: rule for key, rule, _ in rows}
    assert len(output) == len(rows) == configuration_page().count("\n- ")
    # A section within a section is a key of its own; the text of sets by name lists their keys;
    # those of critic.lora are in the part of lora.
    sets = ("data.mix.", "eval.sets.", "sft.validation.", "critic.lora.")
    keys = {key for key in valid_keys(Config) if not key.startswith(sets)}
    keys |= {one.removesuffix(".") for one in sets}
    assert set(output) == keys | {"data.columns", "shaping.overlong"}
    assert output["optimizer.beta1"] == "=0.9` (≥0, <1)"
    assert output["rollout.responses_per_prompt"] == "=8` (≥1)"
    assert output["run.resume"] == "=never`"  # its text names both values
    assert output["trainer.dtype"] == "=auto` (`auto`, `float32`, `bfloat16`)"
    assert output["run.name"] == "=null` (file name)"
