"""The nouns that cross packages.

Shape letters: T tokens in a pack, S sequences in a pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


FinishReason = Literal["stop", "length", "unfinished"]  # the last: other weights go on with it


@dataclass(frozen=True)
class Prompt:
    """One question: chat messages, their token ids, and the answer that earns the reward."""

    index: int  # row in its prompt set
    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str
    row: str = "{}"  # the whole row of the prompt set, as JSON


@dataclass(frozen=True)
class SamplingSettings:
    """How an engine samples; `seed` belongs to one call, the engine derives one per prompt."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, eq=False)
class Response:
    """What the engine generated for one prompt, with the version of the weights that did."""

    prompt_index: int
    sample_index: int
    token_ids: np.ndarray  # [L] int32
    rollout_logprobs: np.ndarray  # [L] float32, of the sampled token; nan of another run: not known
    text: str
    finish_reason: FinishReason
    weight_version: int  # of the weights that generated the first token; -1: of another run
    later_versions: tuple[tuple[int, int], ...] = ()  # (first token, version) of what followed

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(first token, version) of each range of tokens that one version generated."""
        return ((0, self.weight_version), *self.later_versions)

    @property
    def has_engine_logprobs(self) -> bool:
        """Whether an engine reported some, sound or not; what another run left may lack them."""
        import numpy as np  # which a launcher lacks

        return self.weight_version >= 0 or not np.isnan(self.rollout_logprobs).any()


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement: reward, why, and the answer it found."""

    reward: float
    reason: str
    extracted: str | None
    retries: int = 0  # attempts that failed before this one


@dataclass(frozen=True)
class Rollout:
    """A response to a prompt together with its reward."""

    prompt: Prompt
    response: Response
    verdict: Verdict


class Slot(NamedTuple):
    """A place in the order of prompts: group `group` of those that are new in step `step`."""

    step: int  # from 1
    group: int  # from 0


@dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt with all that was frozen as they were generated.

    What is trained, whenever that is, takes its ratios to these log-probs: nothing makes them anew.
    """

    slot: Slot
    rollouts: tuple[Rollout, ...]  # G
    advantages: np.ndarray  # [G] float32
    behavior_logprobs: tuple[np.ndarray | None, ...]  # [G] of [L] float32; None: not computed
    entropy: float  # of the policy that generated, mean over what was generated with it
    generated: int  # the step before whose training
    updates: int  # optimizer updates until then
    first_trained: int = 0  # the step that did; 0 before
    trained: int = 0  # steps that have
    uses: int = 0  # updates that have, in all those steps

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max((len(one.response.token_ids) for one in self.rollouts), default=0)


@dataclass(frozen=True)
class Denominators:
    """Global sizes of one minibatch, over all data-parallel ranks and micro-batches."""

    responses: float
    tokens: float


@dataclass
class TokenBatch:
    """One micro-batch: a pack of S whole sequences in one row of T tokens.

    Everything is aligned on the predicting position j: `labels[j]` is the token that follows
    `tokens[j]` in the same sequence, and log-probs at j are those of `labels[j]`. Not sharded
    over context parallelism: `SequenceLayout.shard` does that.
    """

    tokens: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every sequence
    labels: Tensor  # [T] int64, 0 where nothing follows
    response_mask: Tensor  # [T] bool, labels sampled by the policy and trained on
    lengths: tuple[int, ...]  # [S] padded length of each sequence; they sum to T
    rollout_indices: tuple[int, ...]  # [S] place of each sequence in the rollout batch
    advantages: Tensor  # [S] float32
    rollout_logprobs: Tensor | None  # [T] float32, 0 off the mask; None: not known of all
    behavior_logprobs: Tensor | None = None  # [T] float32, 0 off the mask
    reference_logprobs: Tensor | None = None  # the same, where the objective has a KL term
    traced_logprobs: list[Tensor] | None = (
        None  # the policy's at each update so far; None: not kept
    )
    classes: Tensor | None = None  # [T] int64, of tokens that are reported apart

    def advantages_per_token(self) -> Tensor:
        """Each position's advantage, that of its sequence; [T]."""
        repeats = torch.tensor(self.lengths, device=self.advantages.device)
        return torch.repeat_interleave(self.advantages, repeats)


@dataclass
class Minibatch:
    """One optimizer update: this data-parallel rank's micro-batches and the global sizes."""

    micro_batches: list[TokenBatch]
    denominators: Denominators
    classes: int = 0  # of tokens that are reported apart; the same on every rank
