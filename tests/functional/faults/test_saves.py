"""A kill at every file operation of a save, and checkpoints that were damaged since.

Two ranks save for real, and before each operation on a file the checkpoints' folder is copied, by
whichever process is about to operate (Megatron's forked writers too): what a kill at this moment
would leave. The same ranks then restore from each copy that a restart can tell from the others.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.functional.test_actor_layouts import make_model
from tests.ranks import run_ranks
from tests.unit.trainer.scripted import make_config, make_keeper

RANKS = 2
OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Moments:
    """While it is `open`, copies a folder before each operation that any rank does inside it."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies, self.is_open = folder, copies, False
        copies.mkdir(exist_ok=True)
        sys.addaudithook(self._see)

    @contextlib.contextmanager
    def open(self):
        """Copy from here on."""
        self.is_open = True
        yield
        self.is_open = False

    def _see(self, event, arguments):
        if not self.is_open or not self._is_ours(event, arguments):
            return
        self.is_open = False  # what copying does is not of interest
        with (self.copies / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            name = f"{len(list(self.copies.iterdir())):04d}-{event}-{Path(str(arguments[0])).name}"
            with contextlib.suppress(shutil.Error):  # another process was faster
                shutil.copytree(self.folder, self.copies / name)
        self.is_open = True

    def _is_ours(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            is_written = flags is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            path, is_written = (arguments or [None])[0], event in OPERATIONS
        return bool(is_written) and str(path).startswith(str(self.folder))


def keep(root, actor):
    """A keeper of checkpoints in a run directory, as training has one."""
    from megatron_rl.runs.directory import RunDirectory

    directory, rank = RunDirectory(root), actor.topology.rank
    if rank == 0:
        directory.create(make_config(keep_checkpoints=2))
    torch.distributed.barrier()
    return make_keeper(make_config(keep_checkpoints=2), directory, rank=rank)


def fill(actor, seed):
    """Weights and moments as after some training; the actor's digest then."""
    from megatron_rl.actor.digest import training_state

    generator = torch.Generator().manual_seed(100 * seed + actor.topology.rank)
    with torch.no_grad():
        for tensor in training_state([], actor.optimizer):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return actor.digest()


def describe(checkpoints):
    """Visible folders with their files' sizes, and the names of others: a restart reads no more."""
    visible = [entry for entry in sorted(checkpoints.iterdir()) if entry.name[0] != "."]
    files = (file for folder in visible for file in sorted(folder.rglob("*")))
    hidden = (entry.name for entry in sorted(checkpoints.glob(".*")))
    return *hidden, *((str(one.relative_to(checkpoints)), one.stat().st_size) for one in files)


def save_and_restore(rank, world_size, root):
    """Save steps 1, 2, 3 and 3 again under observation; [(moment, step, is it that step's?)]."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    root = Path(root)
    topology = groups.initialise()
    settings = ActorSettings(warmup_updates=0, dtype=torch.bfloat16)
    actor = MegatronActor(root / "model", topology=topology, settings=settings)
    keeper = keep(root / "run", actor)
    copies = root / "copies"
    digests, moments = {}, Moments(keeper.directory.checkpoints.path, copies)
    for step in (1, 2, 3):
        digests[step] = [fill(actor, step)]
        keeper.done = step
        with moments.open() if step == 3 else contextlib.nullcontext():
            keeper.save(actor)
    digests[3].append(fill(actor, 4))  # another one of the same step, as after an interruption
    with moments.open():
        keeper.save(actor)
    torch.distributed.barrier()
    names = sorted(entry.name for entry in copies.iterdir() if entry.is_dir())
    # Both saves were seen: folders, files, renames, and the deletion of what they replace.
    assert len(names) > 30
    assert {"open", "os.mkdir", "os.rename"} <= {name.split("-")[1] for name in names}
    found, seen = [], set()
    for copy in names:
        if (state := describe(copies / copy)) in seen:
            continue
        seen.add(state)
        run = root / f"run-{copy}"
        if rank == 0:
            run.mkdir()
            shutil.copy(root / "run" / "id", run)
            shutil.copytree(copies / copy, run / "checkpoints")
        torch.distributed.barrier()
        again = keep(run, actor)
        again.restore(actor)
        done = again.done
        hidden = [entry.name for entry in again.directory.checkpoints.path.glob(".*")]
        found.append((copy, done, actor.digest() in digests.get(done, []), hidden))
    again.done = 4  # and what was restored last can be saved and pruned as ever
    again.save(actor)
    if rank == 1:
        next(iter(actor.named_parameters_local().values())).data.view(-1)[0] = float("nan")
    again.done = again.config.trainer.checkpoint_every  # inside of a run, where a full disk is none
    with pytest.raises((FloatingPointError, RuntimeError)) as raised:
        again.save_if_due(actor, again.done)
    return found, again.directory.checkpoints.steps(), repr(raised.value)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    root = tmp_path_factory.mktemp("saves")
    make_model(root / "model", tied=True, layers=1)
    return run_ranks(save_and_restore, RANKS, str(root))


def test_kill_at_any_file_operation_of_save_leaves_intact_checkpoint(answers):
    """The one before or the new one, every bit of it on both ranks, and no hidden file."""
    for found, *_ in answers:
        assert all(is_that and hidden == [] for _, _, is_that, hidden in found), found
        steps = [done for _, done, _, _ in found]
        assert set(steps) == {2, 3}
    assert answers[0][0] == answers[1][0]


def test_restored_state_is_saved_again_unchanged(answers):
    assert all(steps[-1] == 4 for _, steps, _ in answers)


def test_non_finite_weight_on_one_rank_is_not_saved(answers):
    messages, own = (error for _, _, error in answers)
    output = "saving the checkpoint of step {}: {}1 parameters are not finite"
    step = make_config().trainer.checkpoint_every
    assert own.startswith(f"FloatingPointError('{output.format(step, '')}"), own
    assert messages.startswith(
        f"OtherRankError('{output.format(step, 'rank 1: FloatingPointError: ')}"
    ), messages
