"""Conversations on real engines: the same bits however environments answer, and exact tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.types import REPLACES_HISTORY, Prompt, SamplingSettings, sampled_ranges
from tests.ranks import run_ranks

SAMPLES, MAX_TURNS, MAX_TURN_TOKENS, CONTEXT = 4, 5, 6, 96
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=24, seed=5)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'ipython' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message['role'][0] }}={{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def save_model(folder):
    """A model of random weights, large enough that each matters, and a character tokenizer."""
    import transformers

    from tests.character_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(256)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.1 * noise)
    model.save_pretrained(folder)


class Engine:
    """An engine with the model's weights, and one generation with each environment."""

    def __init__(self, folder, tensor):
        from megatron_rl.actor.groups import initialise
        from megatron_rl.actor.weights import HfReader
        from megatron_rl.config.sections import RolloutSection
        from megatron_rl.data.rendering import TurnRenderer, tokenize_messages
        from megatron_rl.data.tokenizer import load_tokenizer
        from megatron_rl.engine.vllm_engine import VllmEngine
        from megatron_rl.models.shape import tensor_shapes

        tokenizer = load_tokenizer(folder)
        topology = initialise()
        self.rank, self.renderer = topology.rank % tensor, TurnRenderer(tokenizer)
        self.engine = VllmEngine(
            folder, RolloutSection(tensor=tensor, kv_cache_mib=8, max_num_seqs=64),
            tokenizer=tokenizer, topology=topology, dtype=torch.float32, max_model_len=CONTEXT,
        )  # fmt: skip
        reader = HfReader(folder)
        weights = ((name, reader.slice(name)[:]) for name in tensor_shapes(self.engine.shape))
        self.engine.receive(weights, version=0)
        self.prompts, self.lines = [], []
        for index in range(6):
            messages = ({"role": "user", "content": f"task {index}?" + "x" * 5 * index},)
            tokens = tuple(tokenize_messages(messages, tokenizer, arguments={}))
            self.prompts.append(Prompt(index, messages, tokens, "7", "test", "{}"))

    def plain(self):
        responses = self.engine.generate(self.prompts, samples=2, sampling=SAMPLING)
        return [as_values(one) for one in responses]

    def converse(
        self, name, *, prompts=None, in_rounds=False, on_error="end", max_rewrites=2,
        module="tests.functional.talking", **limits,
    ):  # fmt: skip
        from megatron_rl.config.sections import EnvironmentSection
        from megatron_rl.engine.engine import ConversationSettings
        from megatron_rl.environments.pool import EnvironmentPool

        pool = None
        if self.rank == 0:
            settings = EnvironmentSection(
                name=f"{module}:{name}", max_context_tokens=1, on_error=on_error,
                time_limit_seconds=3.0 if name == "Digits" else 60.0, max_rewrites=max_rewrites,
            )  # fmt: skip
            pool = EnvironmentPool(settings, echo=self.lines.append)
            pool.start()
        settings = ConversationSettings(
            pool, self.renderer, max_turns=MAX_TURNS, max_turn_tokens=MAX_TURN_TOKENS,
            in_rounds=in_rounds,
        )  # fmt: skip
        try:
            return self.engine.generate(
                self.prompts if prompts is None else prompts, samples=SAMPLES, sampling=SAMPLING,
                conversations=replace(settings, **limits),
            )  # fmt: skip
        finally:
            if pool is not None:
                pool.close()


def as_values(response):
    """Everything of a response, arrays by their bytes."""
    return {
        name: np.asarray(value).tobytes() if hasattr(value, "shape") else value
        for name, value in vars(response).items()
    }


def on_rank(rank, world_size, folder):
    """Results of each way of answering on one engine of all ranks."""
    engine = Engine(folder, tensor=world_size)
    before = engine.plain()
    first = engine.converse("Digits")
    check_costs(engine.engine.environment_costs, first)
    failures = {1: "hangs", 3: "unknown_role", 4: "raises"}
    broken = [replace(p, row=json.dumps({failures.get(p.index, "works"): True}))
              for p in engine.prompts]  # fmt: skip
    results = {
        "first": first,
        "late": engine.converse("Late"),
        "in rounds": engine.converse("Late", in_rounds=True),
        "alone": engine.converse("Digits", prompts=engine.prompts[2:3]),
        "ungraded": engine.converse("Ungraded"),
        "two turns": engine.converse("Digits", max_turns=2),
        "restarts": (restarted := engine.converse("Restarts")),
        "one restart": engine.converse("Restarts", on_error="zero", max_rewrites=1),
        "broken": engine.converse("Digits", prompts=broken, on_error="zero"),
    }
    costs = dict(engine.engine.environment_costs)
    rows = [
        replace(p, row=json.dumps({
            "prompt": p.messages, "token_ids": p.token_ids, "folder": folder,
            "observation": engine.renderer.render(p.messages, [{"role": "user", "content": "go"}]),
        }))
        for p in engine.prompts[:2]
    ]  # fmt: skip
    agents = "tests.functional.token_agents"
    results |= {
        "tokens": engine.converse("Tokens", prompts=rows, module=agents),
        "messages": engine.converse("Messages", prompts=rows, module=agents),
        "foreign": engine.converse("Foreign", prompts=rows, module=agents, on_error="zero"),
    }
    scored = score(engine, first)
    restarted_gaps = check_sequences(engine, restarted, score(engine, restarted))
    for place, error in ((4, "no such page"), (3, "refuses an observation.*no such role")):
        with pytest.raises(RuntimeError, match=f"{error}|on its first rank"):
            engine.converse("Digits", prompts=broken[place:][:1])
    assert engine.plain() == before, "conversations changed what the engine generates"
    return {
        "results": {name: [as_values(one) for one in rows] for name, rows in results.items()},
        "gaps": check_tokens(engine, first, scored),
        "restarted gaps": restarted_gaps,
        "costs": costs,
        "lines": engine.lines,
        "replies": {name: read_replies(folder, name) for name in ("tokens", "messages")},
        "prompts": [list(prompt.token_ids) for prompt in engine.prompts],
        "end": engine.renderer.tokenizer.eos_token_id,
    }


def check_costs(costs, responses):
    """Turns are answered once each; what follows the first turn comes from the prefix cache."""
    if costs:
        assert costs["answers"] == sum(one.turns for one in responses)
        assert 0 < costs["cached_tokens"] < costs["context_tokens"]


def read_replies(folder, name):
    """The replies of each conversation, by its prompt and the sampled tokens of its turns.

    Each is valid in the library whose protocol it follows.
    """
    from openai.types.chat import ChatCompletion
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    form = {"tokens": GenerateTokensResponse, "messages": ChatCompletion}[name]
    lines = (Path(folder) / name).read_text().splitlines()
    found = {}
    for prompt, replies in map(json.loads, lines):
        turns = [reply["choices"][0]["token_ids"] for reply in replies]
        assert all(form.model_validate(reply) for reply in replies)
        found[json.dumps([prompt, turns])] = replies
    return found


def score(engine, responses):
    """Log-probs of each response's tokens in their own sequences, nan where there are none; [K]."""
    sequences, places = [], []
    for place, response in enumerate(responses):
        tokens, bounds = response.token_ids.tolist(), [0, *response.restarts]
        for first, end in zip(bounds, [*bounds[1:], len(tokens)], strict=True):
            before = engine.prompts[place // SAMPLES].token_ids if first == 0 else ()
            sequences.append([*before, *tokens[first:end]][: CONTEXT - 1])
            places.append((place, first + 1 - len(before)))
    found = [np.full(len(one.token_ids), np.nan, np.float32) for one in responses]
    for (place, begin), scores in zip(places, engine.engine.score(sequences), strict=True):
        values = scores.numpy()[max(0, -begin) :]
        found[place][max(0, begin) :][: len(values)] = values
    return found


def check_sequences(engine, responses, all_scores):
    """Largest gap to log-probs of each sequence alone; raises unless some restart twice."""
    gaps = []
    assert {len(one.restarts) for one in responses} == {0, 1, 2}
    for response, scored in zip(responses, all_scores, strict=True):
        gaps.append(np.nanmax(np.abs(scored[response.own] - response.rollout_logprobs)))
        begins = [n for n, one in enumerate(response.messages) if REPLACES_HISTORY in one]
        for number, (first, begin) in enumerate(zip(response.restarts, begins, strict=True)):
            (stop,) = (stop for start, stop in response.observed if start == first)
            history = response.messages[begin : begin + 3]
            assert [one["content"] for one in history[:2]] == [f"sofar{2 * number + 2}", "yes"]
            text = "".join(f"{one['role'][0]}={one['content']}<|end|>" for one in history) + "a="
            assert engine.renderer.tokenizer.decode(response.token_ids[first:stop]) == text
    return float(max(gaps))


def check_tokens(engine, responses, all_scores):
    """Largest gap to log-probs of the whole; raises if an observation is not the template's."""
    gaps = []
    end = engine.renderer.tokenizer.eos_token_id
    for response, scores in zip(responses, all_scores, strict=True):
        tokens = response.token_ids.tolist()
        assert response.turns <= MAX_TURNS and response.length <= SAMPLING.max_tokens
        observations = [one["content"] for one in response.messages if one["role"] == "user"]
        assert len(observations) == len(response.observed) == response.turns - 1
        for (first, stop), text in zip(response.observed, observations, strict=True):
            # A turn that the policy ended has its end once, as a sampled token.
            glue = f"u={text}<|end|>a=" if tokens[first - 1] == end else f"<|end|>u={text}<|end|>a="
            assert engine.renderer.tokenizer.decode(tokens[first:stop]) == glue
        gaps.append(np.nanmax(np.abs(scores[response.own] - response.rollout_logprobs)))
    return float(max(gaps))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two of one engine; `conversation_runs.py` has engines of one."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return run_ranks(on_rank, 2, str(folder))


def test_ranks_of_engine_have_same_conversations(ranks):
    assert ranks[0]["results"] == ranks[1]["results"]


@pytest.mark.parametrize("way", ["late", "in rounds"])
def test_bits_do_not_depend_on_how_environments_answer(ranks, way):
    results = ranks[0]["results"]
    assert results[way] == results["first"]
    turns = {len(one["observed"]) + 1 for one in results["first"]}
    endings = {one["finish_reason"] for one in results["first"]}
    assert len(turns) > 2 and endings == {"stop", "length"}  # it is no test without both


def test_conversation_alone_equals_conversation_in_batch(ranks):
    results = ranks[0]["results"]
    assert results["alone"] == results["first"][2 * SAMPLES : 3 * SAMPLES]


def test_log_probs_are_those_of_the_sequence_since_its_last_restart(ranks):
    assert ranks[0]["gaps"] < 1e-5 and ranks[0]["restarted gaps"] < 1e-5


def test_conversation_that_restarts_too_often_has_no_reward(ranks):
    results = ranks[0]["results"]
    for one, refused in zip(results["restarts"], results["one restart"], strict=True):
        same = refused["restarts"] == one["restarts"]
        assert same == (len(one["restarts"]) < 2) and len(refused["restarts"]) <= 1
        if not same:
            grade = refused["grade"]
            assert (grade.reward, grade.reason) == (0.0, "earlier messages changed")


def test_rewards_of_turns_add_up_and_verifier_grades_without_them(ranks):
    results = ranks[0]["results"]
    assert all(one["grade"].reason == "scripted" for one in results["first"])
    assert {one["grade"].reward for one in results["first"]} > {0.0, 1.0}
    for one, graded in zip(results["ungraded"], results["first"], strict=True):
        assert one | {"grade": None} == one and one["token_ids"] == graded["token_ids"]


@pytest.mark.parametrize("name", ["tokens", "messages"])
def test_tokens_over_http_are_those_of_the_engine(ranks, name):
    replies, prompts, end = (ranks[0][key] for key in ("replies", "prompts", "end"))
    results = ranks[0]["results"][name]
    assert len(results) == 2 * SAMPLES
    for one in results:
        ids = np.frombuffer(one["token_ids"], np.int32).tolist()
        logprobs = iter(np.frombuffer(one["rollout_logprobs"], np.float32).tolist())
        spans = sampled_ranges(one["observed"], len(ids))
        turns = [ids[first:end] for first, end in spans]
        prompt = prompts[one["prompt_index"]]
        assert one["grade"].reward == len(turns[-1]) and len(turns) == 3
        for (first, _), sampled, reply in zip(
            spans, turns, replies[name][json.dumps([prompt, turns])], strict=True
        ):
            (choice,) = reply["choices"]
            expected = [next(logprobs) for _ in sampled]
            given = [token["logprob"] for token in choice["logprobs"]["content"]]
            assert np.array_equal(np.float32(given), np.float32(expected))
            assert [t["token_id"] for t in choice["logprobs"]["content"]] == sampled
            context = len(prompt) + first
            assert reply["usage"] == {
                "prompt_tokens": context, "completion_tokens": len(sampled),
                "total_tokens": context + len(sampled),
            }  # fmt: skip
            cut = len(sampled) == MAX_TURN_TOKENS and sampled[-1] != end
            assert choice["finish_reason"] == ("length" if cut else "stop")
            if name == "messages":
                message = choice["message"]
                assert message["prompt_token_ids"] == prompt + ids[:first]
                assert message["prompt_token_ids"] == reply["prompt_token_ids"]
                assert message["generation_token_ids"] == sampled
                assert message["generation_log_probs"] == given


def test_token_ids_and_messages_are_the_same_conversation(ranks):
    results = ranks[0]["results"]
    for one, other in zip(results["tokens"], results["messages"], strict=True):
        # Of token ids, the template's text between messages is known to the client alone.
        assert one | {"messages": other["messages"]} == other
    assert any(len(one["observed"]) for one in results["tokens"])


def test_token_of_another_model_ends_its_conversation(ranks):
    for one in ranks[0]["results"]["foreign"]:
        assert (one["grade"].reward, one["grade"].reason) == (0.0, "environment failed")


def test_limit_of_turns_cuts_conversations(ranks):
    for cut, whole in zip(*(ranks[0]["results"][k] for k in ("two turns", "first")), strict=True):
        assert whole["token_ids"].startswith(cut["token_ids"])
        assert len(cut["observed"]) == min(1, len(whole["observed"]))
        if len(whole["observed"]) > 1:
            assert cut["finish_reason"] == "length"


def test_broken_environment_ends_its_own_conversations_only(ranks):
    results = ranks[0]["results"]
    reasons = {1: "environment timed out", 3: "environment failed", 4: "environment failed"}
    found = list[int]()
    for place, (one, whole) in enumerate(zip(results["broken"], results["first"], strict=True)):
        if (reason := reasons.get(place // SAMPLES)) and len(whole["observed"]) > 0:
            assert (one["grade"].reward, one["grade"].reason) == (0.0, reason)
            assert one["finish_reason"] == "stop" and len(one["observed"]) == 1
            found.append(place // SAMPLES)
        else:
            assert one == whole
    assert set(found) == set(reasons)
    # The first of each kind is printed, and answers arrive in any order.
    texts = "refuses an observation", "outside the tokenizer", "environment.max_rewrites=1"
    assert any(text in line for line in ranks[0]["lines"] for text in texts), ranks[0]["lines"]
    costs = ranks[0]["costs"]
    assert costs["timed_out"] > 0 and costs["failed"] > 0 and "lost" not in costs
