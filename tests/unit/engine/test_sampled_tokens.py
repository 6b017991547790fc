"""Tokens that the policy sampled stay as sampled, however a vocabulary would split their text."""

import random
from types import SimpleNamespace
from unittest import mock

from megatron_rl.data.rendering import TurnRenderer
from megatron_rl.engine import conversations
from megatron_rl.engine.conversations import Conversations
from megatron_rl.engine.engine import ConversationSettings
from megatron_rl.engine.requests import FinishedResponses
from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.environments.interface import Answer
from megatron_rl.types import Prompt, SamplingSettings

LETTERS = "ab=>< "
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}={{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}a=<think>{% endif %}"
)
END, MAX_TURNS, SAMPLES = 0, 4, 2


def build_tokenizer(draw):
    """Byte-level BPE with random merges, so that most texts have several splits."""
    from transformers import Qwen2Tokenizer

    letters = ["\u0120" if letter == " " else letter for letter in LETTERS] + ["u", "<|"]
    vocab = {"<|end|>": END} | {piece: number + 1 for number, piece in enumerate(letters)}
    merges = []
    for _ in range(draw.randrange(4, 30)):
        left, right = (draw.choice(list(vocab)[1:]) for _ in range(2))
        if left + right not in vocab and len(left + right) < 8:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["<think>"])
    return tokenizer


class Pool:
    """Answers every turn; a conversation ends after some turns."""

    def __init__(self, draw):
        self.draw, self.turns, self.sent = draw, {}, []

    def begin(self, place, row, seed):
        self.turns[place] = 0

    def send(self, place, text, tokens):
        assert tokens.in_thinking == (self.turns[place] > 0)  # the prompt has other tokens
        self.turns[place] += 1
        self.sent.append(place)

    def report_failures(self):
        """No conversation fails."""

    def poll(self, timeout):
        answers = []
        for place in self.sent:
            text = "".join(self.draw.choices(LETTERS, k=self.draw.randrange(6)))
            is_done = self.turns[place] == MAX_TURNS or self.draw.random() < 0.2
            answers.append((place, Answer(None if is_done else text, 1.0 if is_done else None,
                                          done=is_done)))  # fmt: skip
        self.sent = []
        return answers

    def end(self, place):
        pass


class Engine:
    """Samples tokens at random, and keeps what each request had to begin with."""

    def __init__(self, draw, size):
        self.draw, self.size = draw, size
        self.sampled, self.expected = {}, {}

    def run(self, requests, *, on_finished, further):
        waiting = list(requests)
        while waiting or further.is_waiting:
            for request in waiting:
                self.generate(request, on_finished)
            waiting = further.next_requests(wait=True)

    def generate(self, request, on_finished):
        prefix = self.expected.get(request.position, [])
        assert list(request.token_ids[: len(prefix)]) == prefix
        turn = [self.draw.randrange(1, self.size) for _ in range(self.draw.randrange(1, 6))]
        has_ended = self.draw.random() < 0.7
        turn += [END] * has_ended
        self.sampled.setdefault(request.position, []).append(turn)
        self.expected[request.position] = [*request.token_ids, *turn]
        completion = SimpleNamespace(
            token_ids=turn,
            logprobs=SimpleNamespace(logprobs=[-float(token) for token in turn]),
            finish_reason="stop" if has_ended else "length",
        )
        on_finished(request.position, SimpleNamespace(
            outputs=[completion], num_cached_tokens=0, prompt_token_ids=list(request.token_ids)
        ))  # fmt: skip


def test_conversation_keeps_sampled_tokens():
    """If no split differed, this would also hold for code that tokenizes turns again."""
    assert sum(splits_differ(seed) for seed in range(30)) > 15


def splits_differ(seed):
    """Check one run; return whether the text of some turn is split differently from its tokens."""
    draw = random.Random(seed)
    tokenizer = build_tokenizer(draw)
    prompts = [
        Prompt(index, ({"role": "user", "content": "ab"},), (1, 2), "", "", "{}")
        for index in range(2)
    ]
    sampling = SamplingSettings(1.0, top_p=1.0, max_tokens=200, seed=1)
    engine = Engine(draw, len(tokenizer))
    finished = FinishedResponses(
        prompts, SAMPLES, len(prompts) * SAMPLES, 0, None, (0, 1), tokenizer, weight_version=0
    )
    limits = ConversationSettings(
        Pool(draw), TurnRenderer(tokenizer), max_turns=MAX_TURNS, max_turn_tokens=8
    )
    without_vllm = {"sampling_params": lambda *args, **kwargs: None, "tensor_group": lambda: None}
    with mock.patch.multiple(conversations, **without_vllm):
        responses = Conversations(
            [(number, prompt, sampling) for number, prompt in enumerate(prompts)],
            limits, finished, stop=StopCriterion((END,)), max_model_len=400,
        ).run(engine.run)  # fmt: skip
    assert len(responses) == len(prompts) * SAMPLES
    for position, response in responses.items():
        turns = engine.sampled[position]
        tokens, own = response.token_ids.tolist(), [token for turn in turns for token in turn]
        observed = {place for span in response.observed for place in range(*span)}
        assert [token for place, token in enumerate(tokens) if place not in observed] == own
        assert response.rollout_logprobs.tolist() == [-float(token) for token in own]
        assert engine.expected[position] == [1, 2, *tokens]
    return any(
        tokenizer(tokenizer.decode(turn), add_special_tokens=False)["input_ids"] != turn
        for turns in engine.sampled.values()
        for turn in turns
    )
