"""Every value that belongs to a token, a turn, a response or a group of responses, declared once.

What carries values does so by this table: the transport between ranks (`data/token_rows.py`,
`engine/remote.py`), packs (`data/packing.py`), the files of checkpoints
(`runs/group_file.py`) and of rollouts (`runs/rollouts.py`), `offline.rollouts` and the memory
check.

A value that is not in the table may still be in a response, in `Response.further`: a float32 for
each sampled token, from an engine or a file. It goes everywhere that the table's own values go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# What a value has one of: a token of the response, observed ones included (K in all); a token that
# the policy sampled (L); a token that the sampler kept when it drew one (`mask_counts` of each); a
# position that the engine read; a turn; a response; a group, whose responses have the same value.
Unit = Literal["token", "sampled", "kept", "position", "turn", "response", "group"]


@dataclass(frozen=True)
class Column:
    """A value, who determines and holds it, and where it goes.

    Values of tokens and positions are arrays of a `Response`; values of turns, responses and groups
    are fields of `PromptGroup`, which every rank has. A response that is cut, filtered out or
    trained again keeps its arrays as they are. A response that continues gets the engine's arrays
    over all of its tokens; those of the trainer continue with the new tokens (`by`).
    """

    name: str
    dtype: str = "float32"
    unit: Unit = "sampled"
    # Who determines it: the engine, for all tokens so far in each part of a generation; or the
    # trainer, which keeps what it determined once
    by: Literal["engine", "trainer"] = "engine"
    # A response may lack it: an empty array from the engine, None from the trainer
    optional: bool = False
    at_writer: bool = True  # rank 0 has it as well as the owner of the response, for files
    in_group_files: bool = True  # of checkpoints and of groups that are not trained yet
    in_rollout_files: bool = True  # of a run and of its evaluations
    from_files: bool = True  # `offline.rollouts` may have it
    fill: float | None = 0.0  # in packs, where no token was sampled; None: packed in its own way


COLUMNS = (
    Column("token_ids", "int32", "token", fill=None),
    Column("rollout_logprobs"),
    Column("mask_ids", "int32", "kept", optional=True, fill=None),
    Column("mask_counts", "int32", optional=True, fill=None),
    # Many bytes, which only the ranks that train them need: no file has them
    Column("routes", "uint8", "position", optional=True, at_writer=False, in_group_files=False,
           in_rollout_files=False, from_files=False, fill=None),
    Column("behavior_logprobs", by="trainer", optional=True),
    Column("values", by="trainer", optional=True, in_rollout_files=False, from_files=False),
    Column("turn_advantages", unit="turn", by="trainer", optional=True, from_files=False,
           fill=None),
    Column("advantage", unit="response", by="trainer", from_files=False),
    Column("entropy", "float64", "group", by="trainer", in_rollout_files=False, from_files=False),
    *(
        Column(name, "int64", "group", by="trainer", in_rollout_files=False, from_files=False)
        for name in ("generated_at_step", "updates", "first_trained_at_step", "times_trained",
                     "num_updates")
    ),
)  # fmt: skip
ARRAYS = tuple(c for c in COLUMNS if c.unit in ("token", "sampled", "kept", "position"))
OF_GROUP = tuple(column for column in COLUMNS if column.unit == "group")
_NAMES = {column.name for column in ARRAYS}


def array_columns(further: Iterable[str] = ()) -> tuple[Column, ...]:
    """Return the columns that are arrays of responses: the table's, and further names."""
    return (*ARRAYS, *(Column(name, optional=True) for name in sorted({*further} - _NAMES)))
