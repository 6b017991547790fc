"""An error of the writing thread is raised on every rank."""

import pytest

from megatron_rl.runs.rollouts import rollout_row
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import MetricLog, PhaseClock
from megatron_rl.trainer.recorder import Recorder
from tests.ranks import run_ranks
from tests.unit.trainer import test_learning_check
from tests.unit.trainer.scripted import make_config


def fail_to_write(rank, world_size, folder):
    """Errors of a rank when rank 0's disk is full: at the next record, and at the end."""
    from megatron_rl.runs.directory import RunDirectory
    from megatron_rl.telemetry.console import Console
    from megatron_rl.telemetry.metrics import MetricLog, PhaseClock
    from megatron_rl.trainer.recorder import Recorder

    class FullDisk(MetricLog):
        def append(self, row, **more):
            raise OSError(28, "No space left on device")

    config = make_config()
    directory = log = None
    if rank == 0:
        directory = RunDirectory(folder)
        directory.create(config)
        log = FullDisk(folder, config)
    recorder = Recorder(config, directory, log, Console(is_main_rank=False), PhaseClock())
    recorder.record({"step": 0})
    if rank == 0:
        with pytest.raises(OSError, match="No space left"):
            recorder.wait()  # the thread is done, so that the next record must find its error
    output = []
    for call in (lambda: recorder.record({"step": 1}), recorder.finish):
        with pytest.raises((OSError, RuntimeError)) as error:
            call()
        output.append(f"{type(error.value).__name__}: {error.value}")
    return output


def test_write_error_of_one_rank_is_raised_on_every_rank(tmp_path):
    own, others = run_ranks(fail_to_write, 2, tmp_path)
    assert own == ["OSError: [Errno 28] No space left on device"] * 2
    messages = "rank 0: OSError: [Errno 28] No space left on device"
    assert others == [
        f"OtherRankError: recording up to step 1: {messages}",
        f"OtherRankError: recording the run: {messages}",
    ]


@pytest.mark.parametrize(
    ("every", "shown"), [(10, [1, 10, 20]), (1, list(range(1, 22))), (0, []), (15, [1, 15])]
)
def test_sample_rollout_is_printed_at_interval(capsys, every, shown):
    config = test_learning_check.make_config(logging={"sample_every": every})
    batch = test_learning_check.make_batch(config, (1, 0, 1, 0))
    recorder = Recorder(config, None, None, Console(is_main_rank=True), PhaseClock())
    for step in range(1, 22):
        recorder.record({"step": step}, batch)
    lines = capsys.readouterr().out.splitlines()
    samples = [i for i, line in enumerate(lines) if line.startswith("  a sample of step ")]
    assert [int(lines[i].split()[-1].rstrip(":")) for i in samples] == shown
    for i in samples:
        assert "reward" in lines[i + 1] and "2 tokens" in lines[i + 1]
        assert [line.split()[0] for line in lines[i + 2 : i + 5]] == ["prompt", "response", "truth"]


def test_sample_reaches_tensorboard_as_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = test_learning_check.make_config()
    rollout = test_learning_check.make_batch(config, (1, 0, 1, 0)).rollouts[2]
    log = MetricLog(tmp_path, config)
    log.open(first_step=0)
    log.append({"step": 1, "reward/mean": 0.5})
    log.append({"step": 2, "reward/mean": 0.5}, sample=rollout_row(rollout))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("sample/text_summary")
    (text,) = event.tensor_proto.string_val
    assert event.step == 2 and b"prompt 1, response 1: reward 1" in text
    assert all(line.startswith(b"    ") for line in text.split(b"\n"))  # shown as it is
