"""An error of the writing thread is raised on every rank."""

import pytest

from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rollouts import rollout_row
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import MetricLog, PhaseClock
from megatron_rl.trainer import recorder as recorder_module
from megatron_rl.trainer.recorder import Recorder, closing_lines, duration, percent, step_line
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


def test_figure_that_cannot_be_drawn_does_not_end_a_run(tmp_path, capsys, monkeypatch):
    """As after an upgrade of the environment during a run."""

    def fail(folder):
        raise ModuleNotFoundError("No module named 'matplotlib'")

    monkeypatch.setattr(recorder_module, "draw_curves", fail)
    config, directory = make_config(), RunDirectory(tmp_path)
    directory.create(config)
    console = Console(is_main_rank=True)
    recorder = Recorder(config, directory, MetricLog(tmp_path, config), console, PhaseClock())
    recorder.draw()
    recorder.wait()
    assert "curves.png could not be drawn (ModuleNotFoundError: No" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("every", "shown"),
    [
        (10, [1, 10, 20]),
        (0, []),
    ],
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


STEP = {
    "step": 4, "reward/mean": 0.814, "response/length_mean": 38.2, "gate/acceptance": 0.967,
    "response/truncated_fraction": 0.0, "rollout/tokens_per_second": 35_500.0, "time/step": 3.4,
    "time/rollout": 0.6, "time/train": 1.6, "time/sync": 0.01, "eval/heldout/avg@8": 0.84,
    "eval/heldout/pass@8": 0.99,
}  # fmt: skip


def test_step_line_has_progress_remaining_time_and_step_time():
    """12 steps are left, and the last two took 3 s on average: 36 s."""
    assert step_line(STEP, steps=16, recent=(2.6, 3.4)) == (
        "step    4/16  reward 0.814  length 38 (0% cut)  acceptance 0.967  35.5k tok/s"
        "  3.4 s (rollout 0.6 train 1.6)  36 s left at 3 s a step  heldout/avg@8 84.0%"
        "  heldout/pass@8 99.0%"
    )
    assert " left " not in step_line(STEP, steps=4, recent=(2.6,))
    assert step_line({"step": 0, "eval/a/avg@2": 0.33}, steps=16) == "step    0/16  a/avg@2 33.0%"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(41.2, "41 s"), (150, "2 min"), (90 * 3600, "90.0 h")],
)
def test_duration_precision_matches_estimate(seconds, words):
    assert duration(seconds) == words


def test_score_without_sensible_size_stays_short():
    assert [percent(one) for one in (0.954, -0.5, 1e30, None, float("nan"))] == [
        "95.4%", "-50.0%", "1e+32%", "none", "none",
    ]  # fmt: skip
    huge = step_line(STEP | {"reward/mean": 1.05e30, "eval/heldout/avg@8": 1e28}, steps=16)
    assert "reward 1.05e+30 " in huge and len(huge) < 200


@pytest.mark.parametrize("is_below", [True, False])
def test_last_lines_name_next_commands(tmp_path, monkeypatch, is_below):
    """Paths are relative to the folder that the run was started in, where it lies below."""
    rows = [
        {"step": 0, "eval/heldout/avg@8": 0.33, "eval/heldout/pass@8": 0.4},
        {"step": 1, "time/step": 20.04, "time/train": 12.04, "time/rollout": 8.0},
        STEP | {"step": 2, "eval/heldout/avg@8": 0.30, "time/step": 0.1, "time/train": 0.1,
                "time/rollout": 0.0},
    ]  # fmt: skip
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path if is_below else tmp_path / "other")
    run = "runs/run" if is_below else f"{tmp_path}/runs/run"
    assert closing_lines(RunDirectory(tmp_path / "runs" / "run"), rows) == [
        "Trained run: 2 rollout batches",
        "  heldout/avg@8: 33.0% before -> 30.0% after (-3.0 points; best 33.0% at step 0)",
        "  heldout/pass@8: 40.0% before -> 99.0% after (+59.0 points; best 99.0% at step 2)",
        "  seconds: 20 (rollout 8, train 12)",
        f"  run directory: {run}",
        f"  curves:        {run}/curves.png",
        f"  model:         {run}/model  (Hugging Face format)",
        f"  report:        megatron-rl report {run}",
        f"  responses:     megatron-rl rollouts {run}",
    ]


def test_run_of_one_step_uses_singular_and_seconds(tmp_path):
    rows = [{"step": 1, "time/step": 0.03, "time/train": 0.02, "eval/a/avg@2": None}]
    lines = closing_lines(RunDirectory(tmp_path / "run"), rows)
    assert lines[:2] == ["Trained run: 1 rollout batch", "  seconds: 0.03 (train 0.02)"]
