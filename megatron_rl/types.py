"""Shared data types.

Shape letters: T tokens in a pack, S sequences, R responses, of one sequence each unless their
history was replaced; of one response, L tokens that the policy sampled, K tokens with the
observations of its environment between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_rl.columns import ARRAYS, Column, array_columns

if TYPE_CHECKING:  # a command checks a run, and starts it, without torch: its import takes seconds
    import numpy as np
    from torch import Tensor


# unfinished: continues with newer weights; lost: its environment was lost, so it is not trained
FinishReason = Literal["stop", "length", "unfinished", "lost"]


@dataclass(frozen=True)
class Demonstration:
    """A given answer to a prompt, in the form of a `Response`."""

    token_ids: tuple[int, ...]  # [K]
    observed: tuple[tuple[int, int], ...] = ()
    restarts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt: chat messages, their token ids, and the ground truth."""

    index: int  # row in its prompt set
    messages: tuple[dict[str, Any], ...]  # texts role and content, and other keys of the row
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str
    row: str = "{}"  # the whole row of the prompt set, as JSON
    text: str = ""  # what token_ids decode to, special tokens included; empty: not decoded
    tools: tuple[dict[str, Any], ...] = ()  # schemas that the chat template shows
    demonstration: Demonstration | None = None  # of a conversation that is trained as it is


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of one call of an engine, which derives a seed per prompt from `seed`."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    returns_masks: bool = False  # responses have the tokens that were kept (`Response.mask_ids`)


def sampled_ranges(observed: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return (first, end) of each turn of the policy among `count` tokens."""
    bounds = [0, *(bound for one in observed for bound in one), count]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


class RemoteRow:
    """Stands for a response's per-token values that this rank does not have; its length is L."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError(f"the values of {self.length} tokens are on another rank")


def _empty_bytes() -> np.ndarray:
    import numpy as np  # not installed in a launcher environment

    return np.empty(0, np.uint8)


def no_ids() -> np.ndarray:
    """Return an empty array of ids: no sampling masks."""
    import numpy as np  # not installed in a launcher environment

    return np.empty(0, np.int32)


REPLACES_HISTORY = "replaces_history"  # key of the first message of a history that replaces another
Row = Any  # a numpy array, a RemoteRow, or None for an optional value of the trainer


@dataclass(frozen=True, eq=False)
class Response:
    """One response to a prompt, with the versions of the weights that generated it.

    The arrays, which `columns.py` declares, are on the rank `owner` and on rank 0, which writes
    files; every other rank has a `RemoteRow` in their place, and an empty text.

    A conversation with an environment is one response: the turns of the policy, with an observation
    after each turn but the last. Everything that is counted or divided by (t, L, means, limits of
    length, versions) counts sampled tokens; only positions in a sequence count observations too.
    """

    prompt_index: int
    sample_index: int
    token_ids: np.ndarray  # [K] int32
    rollout_logprobs: np.ndarray  # [L] float32, of the sampled token; nan: unknown (another run)
    text: str  # of the last turn
    finish_reason: FinishReason
    weight_version: int  # of the weights that generated the first token; -1: another run
    later_versions: tuple[tuple[int, int], ...] = ()  # (first token, version) of later weights
    owner: int = -1  # -1: every rank has the arrays
    observed: tuple[tuple[int, int], ...] = ()  # (first, end) of each observation, in token_ids
    # first tokens of observations that replace everything before them, the prompt too: each begins
    # another sequence of the same response
    restarts: tuple[int, ...] = ()
    # of a conversation, after those of the prompt; the first of each new history has the key
    # REPLACES_HISTORY, and assistant's messages that came with it were not sampled here
    messages: tuple[dict[str, Any], ...] = ()
    grade: GradeResult | None = None  # by the environment; None: a verifier grades
    # the sampling mask: ids that the sampler kept when it drew each token, one token after the
    # other; int32. Empty: it kept all
    mask_ids: np.ndarray = field(default_factory=no_ids)
    mask_counts: np.ndarray = field(default_factory=no_ids)  # [L] int32, of each token; they add up
    # the engine's experts as bytes, as `EngineRoutes.of` returns them; empty: not recorded. They
    # are on the owner alone, not on rank 0
    routes: np.ndarray = field(default_factory=_empty_bytes)
    # [L] float32, under the policy that generated, fixed when the response was; None: not computed
    behavior_logprobs: np.ndarray | None = None
    # [L] float32, of the critic at the last step that trained the response; None: without a critic
    values: np.ndarray | None = None
    further: Mapping[str, np.ndarray] = field(default_factory=dict)  # [L] float32, by name

    def row(self, name: str) -> Row:
        """Return the array of a column by name; None if the response lacks it."""
        return vars(self)[name] if name in ARRAY_NAMES else self.further.get(name)

    def with_rows(self, rows: Mapping[str, Row]) -> Response:
        """Return the response with other arrays, by the names of their columns."""
        own: dict[str, Any] = {name: row for name, row in rows.items() if name in ARRAY_NAMES}
        others = {name: row for name, row in rows.items() if name not in ARRAY_NAMES}
        further = {**self.further, **{n: row for n, row in others.items() if row is not None}}
        return replace(self, **own, further=further)

    def without_arrays(self) -> Response:
        """Return what ranks have that neither own the response nor write it."""
        rows = {column.name: self.row(column.name) for column in columns_of([self])}
        remote = {name: None if row is None else RemoteRow(len(row)) for name, row in rows.items()}
        return replace(self.with_rows(remote), text="", messages=())

    @property
    def length(self) -> int:
        """L, the number of tokens that the policy sampled."""
        return len(self.token_ids) - sum(end - first for first, end in self.observed)

    @property
    def own(self) -> np.ndarray:
        """Mask of the tokens that the policy sampled; [K] bool."""
        import numpy as np  # not installed in a launcher environment

        own = np.ones(len(self.token_ids), bool)
        for first, end in self.observed:
            own[first:end] = False
        return own

    @property
    def turns(self) -> int:
        """Number of turns of the policy; 1 without an environment."""
        return len(self.observed) + 1

    @property
    def turn_lengths(self) -> list[int]:
        """Number of sampled tokens of each turn; they sum to L."""
        return [end - first for first, end in sampled_ranges(self.observed, len(self.token_ids))]

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(first token, version) of each range of tokens generated by one version."""
        return ((0, self.weight_version), *self.later_versions)

    @property
    def has_engine_logprobs(self) -> bool:
        """True unless the response comes from another run without rollout log-probs."""
        import numpy as np  # not installed in a launcher environment

        return self.weight_version >= 0 or not np.isnan(self.rollout_logprobs).any()


ARRAY_NAMES = frozenset(column.name for column in ARRAYS)  # fields of a Response


def columns_of(responses: Iterable[Response]) -> tuple[Column, ...]:
    """Return the columns of responses: the same on all ranks, whichever arrays they have."""
    return array_columns(name for response in responses for name in response.further)


@dataclass(frozen=True)
class GradeResult:
    """The result of a verifier: reward, reason, and extracted answer."""

    reward: float
    reason: str
    extracted: str | None
    retries: int = 0  # attempts that failed before this one
    rewards: dict[str, float] = field(default_factory=dict)  # by name; `reward` is their sum
    # of each turn of a conversation; `reward` is their sum. Empty: it is the last turn's
    turn_rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rollout:
    """A response to a prompt together with its reward."""

    prompt: Prompt
    response: Response
    grade_result: GradeResult

    @property
    def turn_rewards(self) -> list[float]:
        """Reward of each turn of the policy; that of a verifier is the last turn's."""
        last = [0.0] * (self.response.turns - 1) + [self.grade_result.reward]
        return self.grade_result.turn_rewards or last


class PromptSlot(NamedTuple):
    """A position in the order of prompts: the `group`-th new group of step `step`."""

    step: int  # from 1
    group: int  # from 0


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """The responses to one prompt, with the log-probs frozen at generation.

    Ratios always refer to these log-probs, whenever the group is trained.
    """

    slot: PromptSlot
    rollouts: tuple[Rollout, ...]  # G
    advantages: np.ndarray  # [G] float32; nan: computed once the batch to train is selected
    entropy: float  # of the generating policy, mean over its generation call
    generated_at_step: int  # generated before the training of this step
    updates: int  # optimizer updates before the generation
    first_trained_at_step: int = 0  # 0: not trained yet
    times_trained: int = 0  # number of steps that trained the group
    num_updates: int = 0  # optimizer updates on the group, in all these steps
    # G of [turns] float32; empty: all turns of a response have its advantage
    turn_advantages: tuple[np.ndarray, ...] = ()

    @property
    def behavior_logprobs(self) -> tuple[np.ndarray | None, ...]:
        """[G] of [L] float32, where the response's arrays are; None: not computed."""
        return tuple(rollout.response.behavior_logprobs for rollout in self.rollouts)

    def with_column(self, name: str, rows: Sequence[Row]) -> PromptGroup:
        """Return the group with one row of a column for each response."""
        pairs = zip(self.rollouts, rows, strict=True)
        return replace(
            self,
            rollouts=tuple(
                replace(one, response=one.response.with_rows({name: row})) for one, row in pairs
            ),
        )

    @property
    def learns(self) -> tuple[bool, ...]:
        """[G] True where some turn of the response has an advantage other than 0."""
        rows = self.turn_advantages or self.advantages[:, None]
        return tuple(bool(row.any()) for row in rows)

    @property
    def longest(self) -> int:
        """Length of the longest response in sampled tokens."""
        return max((rollout.response.length for rollout in self.rollouts), default=0)


@dataclass(frozen=True)
class Denominators:
    """Global sizes of one minibatch, over all data-parallel ranks and micro-batches."""

    responses: float
    tokens: float


# Divergences between two policies that are computed over the whole vocabulary.
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


@dataclass(frozen=True)
class ReferenceHead:
    """Inputs of the frozen reference's head on this rank: n response tokens, v vocabulary rows."""

    hidden: Tensor  # [n, h], on the host until the micro-batch is computed
    weight: Tensor  # [v, h], shared by the packs of a rollout batch


@dataclass(frozen=True)
class ReferenceTop:
    """The reference's K likeliest tokens at n response tokens, and the rest as one bucket."""

    ids: Tensor  # [n, K] int64
    logprobs: Tensor  # [n, K] float32
    rest: Tensor  # [n] float32, log-prob of all other tokens together


@dataclass(frozen=True)
class ReferenceParts:
    """The inputs that several references give to a pack, each at some of its n response tokens."""

    positions: tuple[Tensor, ...]  # [n_i] int64 of each part, without common ones
    parts: tuple[ReferenceHead | ReferenceTop, ...]


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that a sampler kept at N positions of a pack, on the host and without padding.

    A position without ids has no mask: its log-prob is over the whole vocabulary.
    """

    ids: Tensor  # [sum of counts] int32
    counts: Tensor  # [N] int32

    def select(self, positions: Tensor) -> SamplingMask:
        """Return the mask of some positions; [n] int64."""
        import torch

        counts = self.counts[positions].long()
        starts = (self.counts.cumsum(0) - self.counts)[positions]
        # place in `ids` of each id: the start of its position, and how far behind that it is
        moved = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
        return SamplingMask(self.ids[moved + torch.arange(len(moved))], counts.int())

    def padded(self) -> Tensor:
        """Return the ids as rows, -1 in unused places; [N, largest count] int32."""
        import torch

        width = int(self.counts.max()) if len(self.counts) else 0
        rows = torch.full((len(self.counts), width), -1, dtype=torch.int32)
        rows[torch.arange(width) < self.counts[:, None]] = self.ids
        return rows


@dataclass
class TokenBatch:
    """One micro-batch: a pack of R whole responses, with their prompts, in one row of T tokens.

    A response is one sequence, or several in order if its history was replaced (`restarts`). The
    model reads each sequence alone; objectives count and add over the whole response. A sequence
    may continue another one, its parent, which several have in common and the pack has once. A
    parent without decisions is among the responses as a filler.

    All fields are aligned with the predicting position j: `labels[j]` is the token that follows
    `tokens[j]` in the same sequence, and log-probs at j are those of `labels[j]`. The batch is not
    sharded over context parallelism; `SequenceLayout.shard` shards it.
    """

    tokens: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every sequence, or from the end of its parent
    labels: Tensor  # [T] int64, 0 at the end of a sequence
    response_mask: Tensor  # [T] bool, labels sampled by the policy and trained on
    lengths: tuple[int, ...]  # [R] padded length of each response; they sum to T
    rollout_indices: tuple[int, ...]  # [R] index of each response in the rollout batch
    advantages: Tensor  # [R] float32
    rollout_logprobs: Tensor | None  # [T] float32, 0 off the mask; None: unknown for a response
    behavior_logprobs: Tensor | None = None  # [T] float32, 0 off the mask
    turn_advantages: Tensor | None = None  # [T] float32, 0 off the mask; None: `advantages`
    reference_logprobs: Tensor | None = None  # [T] float32, for an objective with a KL term
    # on the last stage, for a KL term over the whole vocabulary
    reference_head: ReferenceHead | ReferenceTop | ReferenceParts | None = None
    # [T] each, the policy's at each update so far; None: not recorded
    traced_logprobs: list[Tensor] | None = None
    # [R] padded lengths of the sequences of each response, which sum to its length; (): one each
    parts: tuple[tuple[int, ...], ...] = ()
    # [S] the earlier sequence that each one continues, -1 for none, and its tokens without padding;
    # (): none continues another
    parents: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    # [S] of each, what it is a part of: (rollout, number of the sequence in it); (): as `parents`
    readers: tuple[tuple[tuple[int, int], ...], ...] = ()
    classes: Tensor | None = None  # [T] int64, classes of tokens that are reported separately
    # [layers, t, k] integers: experts chosen in the behavior pass, in this rank's layers that have
    # experts, for this rank's tokens; None: not recorded
    routes: Tensor | None = None
    # of T positions: the tokens that the sampler kept when it drew each label; None: of no label
    sampling_mask: SamplingMask | None = None
    # [T, bytes] uint8: the engine's experts in all layers, 0 at padding, until the actor has taken
    # its part; None: not recorded
    engine_routes: Tensor | None = None
    # by name, [T] float32: `Response.further`
    further: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor | None = None  # [T] float32, of a critic when it computed the advantages
    returns: Tensor | None = None  # [T] float32, what its update regresses on
    # The behavior policy is the policy itself, so that ratios are 1: demonstrations
    on_policy: bool = False

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Padded lengths of the sequences, which sum to T; [S]."""
        return tuple(length for part in self.parts for length in part) or self.lengths

    @property
    def joined(self) -> tuple[int, ...]:
        """Number of sequences of each response; [R], or empty if each has one."""
        return tuple(map(len, self.parts))

    def advantages_per_token(self) -> Tensor:
        """Return the advantages of turns, or else of responses, at their positions; [T]."""
        import torch

        if self.turn_advantages is not None:
            return self.turn_advantages

        repeats = torch.tensor(self.lengths, device=self.advantages.device)
        return torch.repeat_interleave(self.advantages, repeats)


@dataclass
class Minibatch:
    """One optimizer update: this data-parallel rank's micro-batches and the global sizes."""

    micro_batches: list[TokenBatch]
    denominators: Denominators
    classes: int = 0  # number of token classes reported separately; equal on every rank
