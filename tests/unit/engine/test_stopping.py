"""Tests of stop tokens and texts, from the model's files and the config."""

import json
from types import SimpleNamespace

import pytest

from megatron_rl.config.sections import RolloutSection
from megatron_rl.engine.stopping import describe_generation_config, find_stop_rule


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


@pytest.mark.parametrize("value", ["</s>", ["</s>"], [[2]], True, 2.0, [2, None]])
def test_end_that_is_no_number_of_a_token_is_refused(tmp_path, value):
    write(tmp_path, generation_config=value)
    with pytest.raises(ValueError, match=r"eos_token_id has .*, which is no number of a token"):
        find_stop_rule(tmp_path, tokenizer(7), vocab_size=9)


def test_sampling_of_a_generation_config_that_training_does_not_read_is_named(tmp_path):
    """As in released chat models; ids of tokens, neutral values and those of the run are not."""
    file, rollout = tmp_path / "generation_config.json", RolloutSection(temperature=0.7)
    assert describe_generation_config(tmp_path, rollout) is None
    plain = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 2, "do_sample": True,
             "transformers_version": "4.37.0", "_from_model_config": True, "temperature": 0.7,
             "repetition_penalty": 1.0, "top_p": None, "suppress_tokens": []}  # fmt: skip
    file.write_text(json.dumps(plain))
    assert describe_generation_config(tmp_path, rollout) is None
    file.write_text(json.dumps(plain | {"repetition_penalty": 1.05, "top_k": 1, "top_p": 0.8}))
    text = describe_generation_config(tmp_path, rollout)
    assert " has repetition_penalty=1.05, top_k=1, top_p=0.8: training samples by " in text
    file.write_text(json.dumps(plain | {"temperature": 0, "presence_penalty": 1.0}))
    text = describe_generation_config(tmp_path, rollout)
    assert " has presence_penalty=1.0, temperature=0: training samples by " in text
    file.write_text(json.dumps(plain))
    assert "temperature=0.7: " in describe_generation_config(tmp_path, RolloutSection())
