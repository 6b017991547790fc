"""Prompts of a run: read and tokenized on one rank into files that all ranks map into memory."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.data.prompts import JoinedPrompts, PromptMix, PromptOrder, PromptTable
from megatron_rl.distributed.agreement import run_on_rank_0, sync_errors_across_ranks
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.prompt_files import Files, build_order, read_sets
from megatron_rl.types import Prompt

Sets = Mapping[str, Sequence[Prompt]]
SECONDS_UNTIL_VISIBLE = 120.0  # of a new file, on the other nodes of a shared file system


@dataclass(frozen=True)
class PromptSets:
    """Training prompts with their order, and evaluation prompts by set.

    With `sft`, training and validation prompts have demonstrations.
    """

    training: Sequence[Prompt]
    order: PromptOrder | PromptMix
    evaluation: Sets
    validation: Sets = field(default_factory=dict)

    @property
    def asked(self) -> Sequence[Prompt]:
        """Prompts whose responses a verifier grades, of one set; empty if there are none."""
        if self.training and self.training[0].demonstration is None:
            return self.training
        return next(iter(self.evaluation.values()), [])


@contextmanager
def share_prompt_sets(
    config: Config, shape: ModelShape, folder: Path, *, echo: Callable[[str], object]
) -> Iterator[PromptSets]:
    """Read every set of the config on rank 0; provide them on every rank. Collective.

    folder: on a file system of all nodes; it contains the sets until the block ends. echo: prints
    how many prompts are left out. Raises ConfigError on every rank if a set cannot be used.
    """
    with _share(config, shape, config.prompt_files, folder, echo=echo) as sets:
        if config.offline.rollouts is not None:
            yield PromptSets([], PromptOrder(0, seed=config.seed), {})
            return
        parts = [sets[key] for key in config.training]
        order = build_order(config, [len(part) for part in parts])
        training = JoinedPrompts(parts) if config.data.mix else parts[0]
        evaluation = {key: sets[key] for key in config.evaluation_files}
        validation = {key: sets[key] for key in config.validation_files}
        yield PromptSets(training, order, _by_name(evaluation), _by_name(validation))


@contextmanager
def share_evaluation_sets(
    config: Config, shape: ModelShape, folder: Path, *, echo: Callable[[str], object]
) -> Iterator[Sets]:
    """Do the same with the evaluation sets alone. Collective."""
    with _share(config, shape, config.evaluation_files, folder, echo=echo) as sets:
        yield _by_name(sets)


def _by_name(sets: Sets) -> Sets:
    return {key.split(".", 2)[2]: prompts for key, prompts in sets.items()}


@contextmanager
def _share(
    config: Config, shape: ModelShape, files: Files, folder: Path, *, echo: Callable[[str], object]
) -> Iterator[Sets]:
    def write() -> dict[str, tuple[Path, int]]:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        tables = read_sets(config, shape, files, folder=folder, echo=echo)
        return {key: (table, table.stat().st_size) for key, table in tables.items()}

    try:
        tables = run_on_rank_0(write, doing="reading the prompts")
        with sync_errors_across_ranks(doing="opening the prompts"):
            sets = {key: _open(table, size) for key, (table, size) in tables.items()}
        yield sets
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _open(table: Path, size: int) -> PromptTable:
    start = time.monotonic()
    while not table.is_file() or table.stat().st_size != size:
        if time.monotonic() - start > SECONDS_UNTIL_VISIBLE:
            raise UserError(
                f"{table}, which rank 0 has written, is not visible here after "
                f"{SECONDS_UNTIL_VISIBLE:g} s; put run.dir on a file system that all nodes share"
            )
        time.sleep(0.05)
    return PromptTable(table)
