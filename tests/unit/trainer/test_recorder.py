"""What the thread of the writing rank cannot write, every rank raises."""

import pytest

from tests.ranks import run_ranks
from tests.unit.trainer.scripted import make_config


def fail_to_write(rank, world_size, folder):
    """What a rank says when rank 0's disk is full: at the next record, and at the end."""
    from megatron_rl.console import Console
    from megatron_rl.runs.directory import RunDirectory
    from megatron_rl.trainer.metrics import MetricLog, PhaseClock
    from megatron_rl.trainer.recorder import Recorder

    class FullDisk(MetricLog):
        def append(self, row):
            raise OSError(28, "No space left on device")

    config = make_config()
    directory = log = None
    if rank == 0:
        directory = RunDirectory(folder)
        directory.create(config)
        log = FullDisk(folder, config.logging, config={})
    recorder = Recorder(config, directory, log, Console(speaks=False), PhaseClock())
    recorder.record({"step": 0})
    if rank == 0:
        with pytest.raises(OSError, match="No space left"):
            recorder.wait()  # the thread is done, so that the next record must find its error
    said = []
    for call in (lambda: recorder.record({"step": 1}), recorder.finish):
        with pytest.raises((OSError, RuntimeError)) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_what_one_rank_cannot_write_is_raised_on_every_rank(tmp_path):
    own, others = run_ranks(fail_to_write, 2, tmp_path)
    assert own == ["OSError: [Errno 28] No space left on device"] * 2
    told = "rank 0: OSError: [Errno 28] No space left on device"
    assert others == [
        f"RuntimeError: recording up to step 1: {told}",
        f"RuntimeError: recording the run: {told}",
    ]
