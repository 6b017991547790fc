"""Every conversation of a small task, so that expected gradients are finite sums.

A turn has one or two of the policy's symbols 0 (which ends it), 1 and 2. Between two turns the
environment answers by [3], [4, 3] or [4, 4], drawn from a table of the history and of a hidden
state u that the policy never sees. The model has a distribution over the environment's symbols as
well: it is what a trainer would use that took them for the policy's.
"""

import itertools
import math

import numpy as np
import torch

from megatron_rl.data.packing import plan_minibatches
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import TokenInputs
from megatron_rl.types import GradeResult, Prompt, Response, Rollout

PROMPT = Prompt(0, (), (9,), "", "")
ANSWERS = ((3,), (4, 3), (4, 4))
TURNS = [(0,), *itertools.product((1, 2), (0, 1, 2))]
SHORT_TURNS = [(0,), (1,), (2,)]  # of one symbol each


class ConversationTree:
    """All conversations of `turns` turns; logit tables have a row for each history."""

    def __init__(self, *, turns, seed, choices=TURNS, ends=lambda history: False):
        self.choices, self.ends = choices, ends  # ends: a history that the environment ends early
        self.rows, self.environment_rows = {}, {}
        self.tokens, self.observed, self.states, self.hidden, self.answers = [], [], [], [], []
        for hidden in (0, 1):
            self._grow(hidden, (), (), (), turns)
        draw = torch.Generator().manual_seed(seed)
        shape = (len(self.environment_rows), len(ANSWERS))
        table = (1.5 * torch.randn(shape, dtype=torch.float64, generator=draw)).log_softmax(-1)
        # [N] log-probability of the hidden state and of all answers
        self.environment = math.log(0.5) + torch.tensor(
            [sum(table[place].item() for place in one) for one in self.answers],
            dtype=torch.float64,
        )
        self.sizes = [len(tokens) for tokens in self.tokens]
        self.of = torch.repeat_interleave(torch.tensor(self.sizes))
        self.flat_states = torch.tensor([state for one in self.states for state in one])
        self.flat_tokens = torch.tensor([token for one in self.tokens for token in one])
        self.sampled = torch.tensor([flag for r in self.rollouts for flag in r.response.own])
        self.rewards = torch.randn(len(self.tokens), dtype=torch.float64, generator=draw)
        self.base, self.direction = torch.randn(
            2, len(self.rows), 5, dtype=torch.float64, generator=draw
        )

    def _grow(self, hidden, history, observed, answers, turns):
        for turn in self.choices:
            now = (*history, *turn)
            if turns == 1 or self.ends(now):
                self.tokens.append(now)
                self.observed.append(observed)
                self.states.append(
                    [self.rows.setdefault(now[:k], len(self.rows)) for k in range(len(now))]
                )
                self.hidden.append(hidden)
                self.answers.append(answers)
                continue
            key = (hidden, now)
            row = self.environment_rows.setdefault(key, len(self.environment_rows))
            for choice, answer in enumerate(ANSWERS):
                self._grow(
                    hidden, (*now, *answer), (*observed, (len(now), len(now) + len(answer))),
                    (*answers, (row, choice)), turns - 1,
                )  # fmt: skip

    @property
    def rollouts(self):
        """One rollout per conversation, with log-probs of the sampled tokens alone."""
        return [
            Rollout(
                PROMPT,
                Response(
                    0, place, np.array(tokens, np.int32), np.zeros(length(tokens, observed)), "",
                    "stop", 0, observed=observed,
                ),
                GradeResult(0.0, "", None),
            )
            for place, (tokens, observed) in enumerate(
                zip(self.tokens, self.observed, strict=True)
            )
        ]  # fmt: skip

    def logprobs(self, table):
        """Log-prob of every token under the model, observations included; [sum of K]."""
        of_policy = table[:, :3].log_softmax(-1)
        of_environment = table[:, 3:].log_softmax(-1)
        every = torch.cat((of_policy, of_environment), dim=1)
        return every[self.flat_states, self.flat_tokens]

    def probabilities(self, table):
        """Probability of each conversation under policy and environment; [N]."""
        own = torch.where(self.sampled, self.logprobs(table), 0)
        total = torch.zeros(len(self.tokens), dtype=torch.float64).index_add(0, self.of, own)
        return (total + self.environment).exp()

    def true_gradient(self, table):
        table = table.detach().requires_grad_()
        value = (self.probabilities(table) * self.rewards).sum()
        return torch.autograd.grad(value, table)[0]

    def advantages(self, table):
        """E[R | history and token] - E[R | history] of what the policy sees; [sum of K]."""
        mass, value = {}, {}
        for tokens, p, reward in zip(
            self.tokens, self.probabilities(table).tolist(), self.rewards.tolist(), strict=True
        ):
            for k in range(len(tokens) + 1):
                mass[tokens[:k]] = mass.get(tokens[:k], 0.0) + p
                value[tokens[:k]] = value.get(tokens[:k], 0.0) + p * reward
        mean = {history: value[history] / mass[history] for history in mass}
        values = [
            mean[tokens[: k + 1]] - mean[tokens[:k]]
            for tokens in self.tokens
            for k in range(len(tokens))
        ]
        return torch.tensor(values, dtype=torch.float64)

    def expected_gradient(self, objective, *, policy, behavior, advantages):
        """The objective's expected ascent direction over conversations of the behavior policy.

        Masks, t, L and denominators come from the package's packs of the rollouts; only the values
        of the tokens come from the tables. Aggregations that sum are divided by the responses.
        """
        table = policy.detach().requires_grad_()
        (minibatch,) = plan_minibatches(
            self.rollouts, torch.zeros(len(self.tokens)), minibatches=1,
            tokens_per_micro_batch=10**9, topology=Topology.single(),
        )  # fmt: skip
        (pack,) = minibatch.micro_batches
        inputs = [
            self._spread(pack, rows)
            for rows in (self.logprobs(table), self.logprobs(behavior), advantages)
        ]
        result = objective(
            TokenInputs(inputs[0], inputs[1].detach(), inputs[2]),
            layout=SequenceLayout(pack.lengths, pack.response_mask),
            denominators=minibatch.denominators,
        )
        losses = torch.stack([part.sum() for part in result.loss.split(list(pack.lengths))])
        probability = self.probabilities(behavior)[list(pack.rollout_indices)]
        total = (probability * losses).sum() * minibatch.denominators.responses
        return -torch.autograd.grad(total, table)[0]

    def _spread(self, pack, rows):
        """Put values [sum of K] where their tokens are predicted, nan elsewhere; [T]."""
        parts, rows = [], rows.split(self.sizes)
        for index, padded in zip(pack.rollout_indices, pack.lengths, strict=True):
            row = rows[index]
            before = len(PROMPT.token_ids) - 1
            parts += [row.new_full((before,), math.nan), row,
                      row.new_full((padded - before - len(row),), math.nan)]  # fmt: skip
        return torch.cat(parts)


def length(tokens, observed):
    return len(tokens) - sum(end - first for first, end in observed)
