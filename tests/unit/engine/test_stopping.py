"""Tests of stop tokens and texts, from the model's files and the config."""

import json
from types import SimpleNamespace

import pytest

from megatron_rl.engine.stopping import find_stop_rule


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    return folder


def tokenizer(eos):
    names = {2: "<end>", 7: "<turn>"}
    return SimpleNamespace(
        eos_token_id=eos, convert_ids_to_tokens=lambda ids: [names.get(i, "?") for i in ids]
    )


def test_find_stop_rule_combines_configs_tokenizer_and_settings(tmp_path):
    write(tmp_path, config=2)
    assert find_stop_rule(tmp_path, None, vocab_size=9).token_ids == (2,)
    # Like many chat models: the configs name the end of the text, the tokenizer that of a turn.
    rule = find_stop_rule(tmp_path, tokenizer(7), vocab_size=9, token_ids=[2, 8], texts=["##"])
    assert (rule.token_ids, rule.texts) == ((2, 7, 8), ("##",))
    output = rule.describe(tokenizer(7))
    assert output == "a response ends with token 2 <end>, 7 <turn>, 8 ?, or the text '##'"
    write(tmp_path, generation_config=[5, 2])
    assert find_stop_rule(tmp_path, tokenizer(7), vocab_size=9).token_ids == (5, 2, 7)


def test_find_stop_rule_without_stop_token_raises_and_names_setting(tmp_path):
    write(tmp_path, config=None)
    with pytest.raises(ValueError, match=r"never end; set rollout\.stop_token_ids"):
        find_stop_rule(tmp_path, tokenizer(None), vocab_size=9)
    assert find_stop_rule(tmp_path, None, vocab_size=9, token_ids=[4]).token_ids == (4,)
    with pytest.raises(ValueError, match=r"stop token 9 is outside the vocabulary 0\.\.8"):
        find_stop_rule(tmp_path, None, vocab_size=9, token_ids=[9])
