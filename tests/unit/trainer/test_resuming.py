"""Asked to end, killed or failing at any moment: the run goes on as if nothing had happened.

The loop of test_loop around its scripts, with real checkpoints, records and files. A step has
2 epochs x 2 minibatches: four updates; steps 2 and 3 are evaluated and saved. Whatever a script
does is an event, and a run is disturbed at each of its events in turn.
"""

import contextlib
import dataclasses
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from megatron_rl.config import ConfigError
from megatron_rl.engine.engine import GenerationStopped
from megatron_rl.rollouts.partial_rollouts import PartialRolloutSource
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import read_metrics, read_rows
from megatron_rl.runtime.interruption import SIGNALS, Interruption
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.trainer.checkpointing import STEP_STATE_FILE
from megatron_rl.trainer.step_progress import StepProgress
from tests.unit.trainer.scripted import run_loop
from tests.unit.trainer.test_lag import learned

TRAINER = {"steps": 3, "epochs": 2, "minibatches": 2, "checkpoint_every": 2}
UPDATES = 12
WAYS = [{}, {"lag": {"batches": 1}}, {"replay": {"capacity": 2, "fresh": 0.5}}]


class Killed(BaseException):
    """Nothing of ours may catch it."""


class Events(list):
    """Events of the scripted parts; runs an action before the n-th of them, from 0."""

    def __init__(self, when, act):
        super().__init__()
        self.when, self.act = when, act

    def append(self, event):
        if len(self) == self.when:
            self.when = None
            self.act(event)
        super().append(event)


class Writer:
    """Writes at once, or as late as may be: a kill then takes along what waits."""

    def __init__(self, *, late=False):
        self.late, self.waiting = late, []

    def submit(self, job):
        if not self.late:
            self.wait()
        self.waiting.append(job)
        if not self.late:
            self.wait()

    def wait(self):
        while self.waiting:
            self.waiting.pop(0)()


def run(folder, *, keep=None, events=None, late=False, **options):
    options.setdefault("has_experts", not options.get("sections"))  # replayed in all updates
    return run_loop(
        folder, trainer=TRAINER, keep=keep or Interruption(), events=events,
        writer=Writer(late=late), **options,
    )  # fmt: skip


def die(event):
    raise Killed


def assert_same(folder, whole):
    assert learned(folder) == learned(whole)
    assert read_rows(folder / "schedule.jsonl") == read_rows(whole / "schedule.jsonl")
    steps = [[row["step"] for row in read_rows(f / "timeline.jsonl")] for f in (folder, whole)]
    assert steps[0] == steps[1]
    for step in range(1, TRAINER["steps"] + 1):
        for kind in ("rollouts", "updates", "traces"):
            file = f"{kind}/step_{step:06d}.parquet"
            assert pq.read_table(folder / file).equals(pq.read_table(whole / file))
    names = [sorted(file.name for file in (f / "eval").iterdir()) for f in (folder, whole)]
    assert names[0] == names[1]


def moments(whole, sections):
    """Each event in turn; every third if groups are also kept or trained again."""
    return range(0, len(whole), 3 if sections else 1)


def count(kind, *lives):
    return sum(event[0] == kind for life in lives for event in life)


@pytest.mark.slow
@pytest.mark.parametrize("sections", WAYS, ids=str)
def test_stop_request_at_any_event_repeats_nothing(tmp_path, sections):
    """No update, nor a rollout batch but for the one out of which the run ends."""
    whole, _ = run(tmp_path / "whole", sections=sections)
    for when in moments(whole, sections):
        folder, interruption = tmp_path / str(when), Interruption()

        def ask(event, interruption=interruption):
            interruption.received = SIGNALS[0]
            if event[0] == "generate":  # as the engine does it
                raise GenerationStopped

        first = Events(when, ask)
        with contextlib.suppress(
            GenerationStopped
        ):  # out of the first evaluation: not deferred yet
            run(folder, keep=interruption, events=first, sections=sections)
        is_saved = RunDirectory(folder).checkpoints.intact_steps()
        second, trainer = run(folder, sections=sections)
        assert trainer.actor.updates == count("update", first, second) == UPDATES
        assert_same(folder, tmp_path / "whole")
        again = count("generate", first, second) - count("generate", whole)
        assert again == (0 if is_saved else count("generate", first))
        assert not list((folder / "generated").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "late"),
    [
        (WAYS[0], False), (WAYS[0], True), (WAYS[1], True), (WAYS[2], True),
        ({"logging": {"keep_rollouts": 1}}, True),
    ],
)  # fmt: skip
def test_kill_at_any_event_ends_like_undisturbed_run(tmp_path, sections, late):
    whole, _ = run(tmp_path / "whole", sections=sections)
    again = []
    for when in moments(whole, sections):
        folder, first = tmp_path / str(when), Events(when, die)
        with pytest.raises(Killed):
            run(folder, events=first, late=late, sections=sections)
        second, trainer = run(folder, sections=sections)
        assert trainer.actor.updates == UPDATES
        assert_same(folder, tmp_path / "whole")
        again.append(count("generate", first, second) - count("generate", whole))
    # A checkpoint every second step: of what a kill takes back, the batch that the saved weights
    # had generated is on disk. An evaluation and the other batch come again; before the first
    # batch is whole, all that the first step generates.
    if not late:
        assert max(again) == 2


def test_stop_request_after_last_save_changes_nothing(tmp_path):
    """As when srun ends the other ranks because the first one has ended: seconds later, perhaps."""
    interruption = Interruption()

    def ask(event):
        interruption.received = SIGNALS[0]

    run(tmp_path, keep=interruption, events=Events(3, ask))
    interruption.record_signal(
        SIGNALS[0], at_second=lambda: pytest.fail("ends at once, with its status")
    )


@pytest.mark.parametrize("part", ["step_progress", "held"])
def test_step_in_progress_of_another_release_is_refused(tmp_path, monkeypatch, part):
    """Sound by its sums, but of another form: no traceback, and nothing is set aside or lost."""
    interruption = Interruption()

    def ask(event):
        interruption.received = SIGNALS[0]

    with monkeypatch.context() as other:
        if part == "held":
            kept = dataclasses.asdict
            without = lambda one: {k: v for k, v in kept(one).items() if k != "reward"}  # noqa: E731
            other.setattr("megatron_rl.runs.group_file.dataclasses.asdict", without)
        else:
            gather = StepProgress.gather
            without = lambda one: {k: v for k, v in gather(one).items() if k != "traces"}  # noqa: E731
            other.setattr(StepProgress, "gather", without)
        run(tmp_path, keep=interruption, events=Events(3, ask), sections=WAYS[1])
    (step,) = RunDirectory(tmp_path).checkpoints.intact_steps()
    with pytest.raises(
        ConfigError, match=rf"step_{step:06d} has step progress or rollouts .* with that rele"
    ):
        run(tmp_path, sections=WAYS[1])
    assert RunDirectory(tmp_path).checkpoints.intact_steps() == [step]


def test_stop_message_names_signal_and_saved_update(tmp_path, monkeypatch):
    output, interruption = [], Interruption()
    monkeypatch.setattr(Console, "echo", lambda self, text="": output.append(text))
    whole, _ = run(tmp_path / "whole")
    third = [index for index, event in enumerate(whole) if event[0] == "update"][2]

    def request(event):
        interruption.received = SIGNALS[0]

    run(tmp_path / "a", keep=interruption, events=Events(third, request))
    (message,) = (line for line in output if line.startswith("Received "))
    expected = f"Received {SIGNALS[0].name}: checkpoint saved at step 1, update 3. Resume with:"
    assert message.splitlines()[0] == expected
    assert message.endswith("run.resume=auto")


def test_restored_step_of_partial_rollouts_does_not_advance():
    """Its window is in the checkpoint: another one would generate with the wrong weights."""
    calls = []
    run = SimpleNamespace(clock=PhaseClock(), buffer=None)
    source = PartialRolloutSource(run, None, None, None, engine=None)
    source.due = lambda step: []
    source.advance = lambda step, slots: calls.append(("advance", step)) or 1 / 0
    source.resume(3)
    assert source.score(3, source.generate(3)).batches == [] == calls
    with pytest.raises(ZeroDivisionError):
        source.generate(4)


def test_checkpoint_is_saved_before_failing_evaluation(tmp_path):
    whole, _ = run(tmp_path / "whole")
    # Generated: the evaluation before training, two rollout batches, the evaluation of step 2.
    evaluation = [place for place, event in enumerate(whole) if event[0] == "generate"][3]

    def fail(event):
        raise RuntimeError("the verifier of the evaluation is away")

    with pytest.raises(RuntimeError, match="is away"):
        run(tmp_path / "a", events=Events(evaluation, fail))
    assert RunDirectory(tmp_path / "a").checkpoints.intact_steps() == [2]
    assert [row["step"] for row in read_metrics(tmp_path / "a")] == [0, 1]
    events, _ = run(tmp_path / "a")
    assert count("update", events) == UPDATES / 3  # those of the third step
    assert_same(tmp_path / "a", tmp_path / "whole")


@pytest.mark.parametrize("when", ["interrupted", "killed"])
def test_step_with_early_stopping_is_not_recorded_again(tmp_path, when):
    """The third update of step 2 is refused; the run ends after that step was saved."""
    options = {"sections": {"early_stopping": {"kl": 0.1}}}
    whole, _ = run(tmp_path / "whole", drifted=(7,), **options)
    assert [row.get("train/early_stopped") for row in learned(tmp_path / "whole")[1:]] == [0, 1, 0]
    third = [place for place, event in enumerate(whole) if event[0] == "generate"][4]
    interruption = Interruption()

    def end(event):
        if when == "killed":
            raise Killed
        interruption.received = SIGNALS[0]
        raise GenerationStopped

    folder = tmp_path / "a"
    with contextlib.suppress(Killed):
        run(folder, keep=interruption, events=Events(third, end), drifted=(7,), **options)
    saved = RunDirectory(folder).checkpoints.folder(2)
    assert (saved / STEP_STATE_FILE).is_file()  # saved once, before its evaluation

    def written():
        files = [saved, *sorted((folder / "eval").iterdir())[:2]]
        return [file.stat().st_mtime_ns for file in files]

    before = written()
    events, _ = run(folder, **options)
    # The rollouts of step 3 and its evaluation; nothing of step 2.
    assert (count("generate", events), count("update", events)) == (2, 4)
    assert written() == before
    assert_same(folder, tmp_path / "whole")


def test_skipped_updates_are_recorded_across_interruption(tmp_path):
    """The first update is skipped, before the third the run is interrupted."""
    whole, _ = run(tmp_path / "whole", unusable=(1,))
    third = [place for place, event in enumerate(whole) if event[0] == "update"][2]
    interruption = Interruption()

    def ask(event):
        interruption.received = SIGNALS[0]

    run(tmp_path / "a", keep=interruption, events=Events(third, ask), unusable=(1,))
    run(tmp_path / "a")
    assert_same(tmp_path / "a", tmp_path / "whole")
    journals = [
        tmp_path / name / "skipped_updates" / "skipped_updates.jsonl" for name in ("a", "whole")
    ]
    assert journals[0].read_text() == journals[1].read_text() != ""


@pytest.mark.parametrize("behavior", ["actor", "engine"])
def test_critics_updates_are_interrupted_where_a_step_can_resume_inside(tmp_path, behavior):
    """Its second update is skipped, in its third the run is asked to end."""
    options = {"sections": {"critic": {}, "behavior": behavior}, "critic_unusable": (2,)}
    whole, _ = run(tmp_path / "whole", **options)
    third = [place for place, event in enumerate(whole) if event[0] == "critic"][2]
    interruption = Interruption()

    def ask(event):
        interruption.received = SIGNALS[0]

    first, _ = run(tmp_path / "a", keep=interruption, events=Events(third, ask), **options)
    folder = RunDirectory(tmp_path / "a").checkpoints.folder(1)
    is_inside = behavior == "actor"
    assert (folder / STEP_STATE_FILE).is_file() == is_inside
    second, _ = run(tmp_path / "a", **options | {"critic_unusable": ()})
    assert count("critic", first) == (3 if is_inside else 4)
    assert (count("critic", first, second), count("update", first, second)) == (UPDATES, UPDATES)
    assert_same(tmp_path / "a", tmp_path / "whole")
    rows = [read_rows(tmp_path / name / "skipped_updates" / "skipped_updates.jsonl")
            for name in ("a", "whole")]  # fmt: skip
    assert rows[0] == rows[1] and [(row["update"], row["model"]) for row in rows[0]] == [
        (2, "critic")
    ]


def test_consecutive_skipped_updates_are_counted_across_interruption(tmp_path):
    """Three end a run; here it is interrupted during the second of them, inside of a step."""
    whole, _ = run(tmp_path / "whole")
    sixth = [place for place, event in enumerate(whole) if event[0] == "update"][5]
    interruption = Interruption()

    def ask(event):
        interruption.received = SIGNALS[0]

    run(tmp_path / "a", keep=interruption, events=Events(sixth, ask), unusable=(5, 6))
    assert RunDirectory(tmp_path / "a").checkpoints.manifest(2)["skipped_in_a_row"] == 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FloatingPointError, match="3 consecutive updates"):
        run(tmp_path / "a", unusable=(1,))  # the seventh
    run(tmp_path / "b", unusable=(2, 3))  # the seventh is well, and the count begins again


def test_rollouts_of_another_layout_are_regenerated(tmp_path):
    """Its behavior log-probs would not be those of this layout in the last bits."""
    whole, _ = run(tmp_path / "whole")
    second_of_step_3 = [place for place, event in enumerate(whole) if event[0] == "update"][9]
    for name, layout in (("same", "one"), ("other", "two")):
        with pytest.raises(Killed):
            run(tmp_path / name, events=Events(second_of_step_3, die))
        assert RunDirectory(tmp_path / name).generated.file(3).is_file()
        events, _ = run(tmp_path / name, layout=layout)
        assert count("generate", events) == (1 if layout == "one" else 2)  # one is the evaluation
        assert_same(tmp_path / name, tmp_path / "whole")
