"""Every row of the GPU check fails on wrong results; tested on a CPU with fakes."""

import argparse
import importlib.metadata
import itertools
import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from megatron_rl.config.sections import Name
from tools.benchmarks import against_trl
from tools.gpu_check import __main__ as command
from tools.gpu_check import (
    actors,
    candidates,
    dry_run,
    engine,
    machine,
    mended,
    numerics,
    order,
    peers,
    row,
    runs,
    speed,
)
from tools.gpu_check.row import Row, run_row


def halved(function):
    """Halve the floating point tensors of a result."""

    def wrong(*args, **kwargs):
        made = function(*args, **kwargs)
        return (made[0] * 0.5, *made[1:]) if isinstance(made, tuple) else made * 0.5

    return wrong


def failing(name, check):
    made = run_row(name, check)
    assert made.status == "FAILED", made.line()
    return made.detail


def test_machine_check_names_unsupported_versions(monkeypatch):
    from megatron_rl.commands import doctor

    assert run_row("machine", machine.check_machine).status == "ok"
    monkeypatch.setattr(doctor, "installed_version", lambda *names: "0.1")
    assert "torch 0.1 is not ==2.13.0" in failing("machine", machine.check_machine)


def test_exchange_check_fails_on_inexact_results():
    good = {"backend": "x", "sum_gbps": 1.0, "message_gbps": 1.0, "sum_error": 0.0,
            "message_error": 0.0}  # fmt: skip
    machine.judge_exchange(Row("two_devices"), [good, good])
    for key in ("sum_error", "message_error"):
        with pytest.raises(AssertionError, match="error of the"):
            machine.judge_exchange(Row("two_devices"), [good, {**good, key: 1e-3}])


def test_groups_check_fails_on_wrong_sums(monkeypatch):
    monkeypatch.setattr(numerics, "one_process", lambda: SimpleNamespace(
        device="cpu", tp_group=0, cp_group=0, pp_group=0, dp_cp_group=0))  # fmt: skip
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "stand-in")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda one, group: one.add_(1))
    assert "sums over groups of one" in failing("groups", numerics.check_groups)


@pytest.mark.parametrize(
    ("check", "module", "name"),
    [
        (numerics.check_head, "megatron_rl.distributed.vocab_parallel", "token_logprobs"),
        (numerics.check_attention, "megatron_rl.distributed.context_attention",
         "context_attention"),
        (numerics.check_chunks, "megatron_rl.distributed.context_attention", "attend_fused"),
    ],
)  # fmt: skip
def test_numeric_checks_fail_on_wrong_results(monkeypatch, check, module, name):
    imported = __import__(module, fromlist=[name])
    monkeypatch.setattr(imported, name, halved(getattr(imported, name)))
    assert "error is" in failing(name, check)


def test_objective_is_compared_with_cpu(monkeypatch):
    from megatron_rl import objectives

    calls, right = itertools.count(), objectives.policy_loss

    def drifting(*args, **kwargs):
        loss, statistics = right(*args, **kwargs)
        return loss + next(calls) * 1e-3, statistics

    monkeypatch.setattr(objectives, "policy_loss", drifting)
    assert "loss error" in failing("objective", numerics.check_objective)


def test_memory_must_grow_linearly(monkeypatch):
    peaks = iter([1 << 20, 4 << 20])
    monkeypatch.setattr(numerics, "DEVICE", "cuda")
    monkeypatch.setattr(numerics, "attention_inputs", lambda *args, **kwargs: None)
    monkeypatch.setattr(numerics, "attend", lambda *args: torch.zeros(1, requires_grad=True))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    assert "growth from 8k to 16k tokens is 4" in failing("memory", numerics.check_memory)


class Actor:
    """Fake actor with the interface that the rows use."""

    ddp_chunks = optimizer = None

    def __init__(self, *norms, deviation=0.0):
        self.norms, self.deviation = iter(norms), deviation

    def update(self, batch, objective):
        statistics = SimpleNamespace(to_metrics=lambda: {"ratio/max_deviation": self.deviation})
        return SimpleNamespace(statistics=statistics, grad_norm=next(self.norms))

    def sleep(self): ...

    def save(self, folder): ...

    def load(self, folder): ...


@pytest.mark.parametrize(
    ("actor", "output"),
    [
        (Actor(1.0, deviation=1e-6), "first ratio - 1 is 1e-06"),
        (Actor(1.0, 1.0, 1.1), "update after loading is 0.1"),
    ],
)
def test_update_check_fails_on_inexact_updates(monkeypatch, actor, output):
    monkeypatch.setattr(actors, "_save_model", lambda *_: None)
    monkeypatch.setattr(actors, "_build", lambda *_: (actor, None, None))
    memory = "megatron_rl.actor.memory.training_state_bytes"
    monkeypatch.setattr(memory, lambda *_: 1 << 20)
    assert output in failing("update", actors.check_update)


def test_update_check_fails_if_sleep_frees_no_memory(monkeypatch):
    monkeypatch.setattr(actors, "DEVICE", "cuda")
    monkeypatch.setattr(actors, "_save_model", lambda *_: None)
    monkeypatch.setattr(actors, "_build", lambda *_: (Actor(1.0), None, None))
    memory = "megatron_rl.actor.memory.training_state_bytes"
    monkeypatch.setattr(memory, lambda *_: 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 20)
    assert "left on the device asleep is 1" in failing("update", actors.check_update)


def test_parity_compares_with_transformers(monkeypatch):
    wrong = [np.full(len(one.response.token_ids), -1.0) for one in actors._rollouts()]
    monkeypatch.setattr(actors, "MODELS", {"Qwen2": actors.MODELS["Qwen2"]})
    monkeypatch.setattr(actors, "_build", lambda *_: (None, None, wrong))
    assert "Qwen2 mean gap" in failing("parity", actors.check_parity)


@pytest.mark.parametrize(
    ("check", "logprob", "norm", "deviation", "output"),
    [
        (actors.check_transformer_engine, -9.0, 1.0, 0.0, "mean gap"),
        (actors.check_fp8, -1.0, 2.0, 0.0, "gradient norm's change"),
        (actors.check_fp8, -1.0, 1.0, 1e-6, "first ratio"),
    ],
)
def test_layer_checks_fail_on_differences(monkeypatch, check, logprob, norm, deviation, output):
    def build(folder, *, transformer_engine=False, fp8=None):
        value = logprob if transformer_engine else -1.0
        actor = Actor(norm, deviation=deviation) if transformer_engine else Actor(1.0)
        return actor, None, [np.array([value])]

    monkeypatch.setattr(actors, "_transformer_engine", lambda: "stand-in")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(actors, "_save_model", lambda *_: None)
    monkeypatch.setattr(actors, "_build", build)
    assert output in failing("layers", check)


def test_operations_of_update():
    # hidden 4, 2 heads of 2, 1 of keys; a layer 4 * (2 * 4 + 4 + 3 * 8) = 144, the head 4 * 10;
    # 6 * 184 * 3 tokens; pairs 1 + 2 + 3 = 6, 12 * 1 * 4 * 6.
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 10}  # fmt: skip
    assert speed.model_flop(config, [3]) == 6 * 184 * 3 + 12 * 4 * 6
    # With experts: queries 2 * 3, keys 2 * 3; a layer 4 * (12 + 6 + 2 * 3 * 5 + 7) = 220.
    config |= {"head_dim": 3, "num_experts": 7, "num_experts_per_tok": 2,
               "moe_intermediate_size": 5}  # fmt: skip
    assert speed.model_flop(config, [1]) == 6 * 260 + 12 * 6


def test_speed_check_fails_on_low_utilization(monkeypatch):
    monkeypatch.setattr(speed, "DEVICE", "cuda")
    for check in (speed.check_update_16k, speed.check_update_32k):
        monkeypatch.setattr(speed, "_measure", lambda row, *_: speed.judge_utilization(row, 0.02))
        assert "utilization is 0.02, below 0.25" in failing("update", check)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"gap": 1.0}, "log-prob gap"),
        ({"repeated": False}, "same answers"),
        ({"direct": False}, "written directly"),
        ({"share": 0.9}, "share of memory"),
        ({"asleep": 0.5}, "kept asleep"),
    ],
)
def test_engine_check_fails_on_each_fault(monkeypatch, change, output):
    good = engine.EngineReport(0.5, 0.02, True, 0.1, 1 << 30, 0.01, True)
    monkeypatch.setattr(engine, "DEVICE", "cuda")
    engine.judge_engine(Row("engine"), good)
    monkeypatch.setattr(engine, "run_engine", lambda folder: replace(good, **change))
    assert output in failing("engine", engine.check_engine)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"ratio/first_minibatch_max_deviation": 1e-7}, "first ratio - 1"),
        ({"mismatch/logprob_abs_diff_mean": 0.5}, "log-prob gap"),
        ({"reward/mean": 0.3}, "reward at last"),
        (None, "steps is 7"),
    ],
)
def test_run_check_fails_if_inexact_or_not_learning(change, output):
    steps = [
        {"reward/mean": 0.3 + 0.05 * step, "time/step": 1.0, "mismatch/logprob_abs_diff_mean": 0.01,
         "ratio/first_minibatch_max_deviation": 0.0, "memory/train_peak_gib": 1.0}
        for step in range(engine.STEPS)
    ]  # fmt: skip
    engine.judge_quickstart(Row("quickstart"), steps)
    if change is None:
        steps.pop()
    else:
        steps[-1] |= change
    with pytest.raises(AssertionError, match=output):
        engine.judge_quickstart(Row("quickstart"), steps)


@pytest.mark.parametrize("kept", [{"sampling/kept_max": 1.0}, {}])
def test_sampling_check_fails_if_nothing_was_removed(monkeypatch, kept):
    monkeypatch.setattr(engine, "judge_quickstart", lambda row, metrics: None)  # as above
    engine.judge_sampling(Row("sampling"), [{}, {"sampling/kept_max": 2.0}])
    with pytest.raises(AssertionError, match="most kept tokens"):
        engine.judge_sampling(Row("sampling"), [{}, kept])


def test_dry_run_check_fails_on_different_peaks(monkeypatch):
    held = {"behavior": 1000, "update": 2000}
    monkeypatch.setattr(dry_run, "allocated", lambda file: held)
    monkeypatch.setattr(dry_run, "peaks_of_a_dry_run", lambda file: held)
    assert run_row("dry_run", dry_run.check_dry_run).status == "ok"
    monkeypatch.setattr(dry_run, "peaks_of_a_dry_run", lambda file: {**held, "update": 1950})
    output = failing("dry_run", dry_run.check_dry_run)
    assert "update dry run / measured - 1 is 0.025" in output


def test_every_row_is_documented():
    assert not [row.name for row in command.ORDER if not (row.check.__doc__ or "").strip()]


def test_nan_fails_every_bound():
    for judge in (Row("x").at_most, Row("x").at_least):
        with pytest.raises(AssertionError, match="x is nan"):
            judge("x", float("nan"), 1.0)


def test_dead_or_hanging_process_fails_only_its_rows(monkeypatch, tmp_path, capsys):
    def run(arguments, timeout, **_):
        names = arguments[arguments.index("--only") + 1 :]
        answers = arguments[arguments.index("--here") + 1]
        if "engine" in names:
            raise subprocess.TimeoutExpired(arguments, timeout)
        with open(answers, "a") as file:  # the second row of a family never comes
            file.write(json.dumps(vars(Row(names[0]))) + "\n")
        return SimpleNamespace(returncode=-11)

    monkeypatch.setattr(command.subprocess, "run", run)
    out = tmp_path / "report.json"
    only = ["groups", "head", "engine", "quickstart"]
    monkeypatch.setattr("sys.argv", ["gpu_check", "--output", str(out), "--only", *only])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    report = json.loads(out.read_text())
    assert report["verdict"] == "failed: engine, head"
    assert {one["name"]: one["status"] for one in report["rows"]} == {
        "groups": "ok", "head": "FAILED", "engine": "FAILED", "quickstart": "ok",
    }  # fmt: skip
    details = {one["name"]: one["detail"] for one in report["rows"]}
    assert details["head"] == "its process exited with status -11"
    assert details["engine"] == "no answer in 477 s"
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert "FAILED" in capsys.readouterr().out


def run_command(monkeypatch, tmp_path, seconds, *options):
    """Run the command with a clock that each family's process advances; return the report."""
    now = [0.0]

    def run(arguments, timeout, **_):
        names = arguments[arguments.index("--only") + 1 :]
        now[0] += sum(seconds[name] for name in names)
        with open(arguments[arguments.index("--here") + 1], "a") as file:
            file.writelines(json.dumps(vars(Row(name))) + "\n" for name in names)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    out = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["gpu_check", "--output", str(out), *options])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    return json.loads(out.read_text())


def test_budget_runs_the_rows_that_fit_in_order_of_value(monkeypatch, tmp_path):
    report = run_command(
        monkeypatch, tmp_path, dict.fromkeys(command.NAMES, 10.0), "--budget", "270s"
    )
    status = {one["name"]: one["status"] for one in report["rows"]}
    assert list(status) == command.NAMES
    # machine, mended, update and the quickstart take 40 s; peers would need 515.
    expected = dict.fromkeys(command.NAMES, "ok")
    short = {"heads", "swiglu", "attention_kept", "decode_graphs", "routes"}
    expected |= dict.fromkeys(set(order.LONG) - short, "skipped")
    late = ("fp8", "shared_prompts", "critic", "dry_run")  # 240 of 270 s are gone
    expected |= dict.fromkeys(late, "skipped")
    assert status == expected
    details = {one["name"]: one["detail"] for one in report["rows"]}
    assert details["peers"] == "needs about 500 s and a start; 230 s of the budget left"
    assert report["budget"] == 270.0


def test_without_budget_the_long_rows_are_left_out(monkeypatch, tmp_path):
    report = run_command(monkeypatch, tmp_path, dict.fromkeys(command.NAMES, 1.0))
    left_out = set(command.NAMES) - {one["name"] for one in report["rows"]}
    assert left_out == set(order.LONG)


def test_a_family_ends_at_the_budget():
    rows = [one for one in order.ORDER if one.family == "speed"]
    assert [one.name for one in order.fitting(rows, 45.0)] == ["update_16k"]
    assert order.fitting(rows, 40.0) == []
    assert order.limit(rows) == max(240.0, 5 * (15 + 28.6 + 13.7))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("25m", 1500),
        ("1h", 3600),
    ],
)
def test_budgets_have_units(text, seconds):
    assert order.parse_budget(text) == seconds
    for wrong in ("", "m", "-1m", "nan", "inf", "0"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 25m"):
            order.parse_budget(wrong)


@pytest.mark.parametrize("wrong", ["digest", "adam"])
def test_check_of_what_was_mended_fails(monkeypatch, wrong):
    from megatron_rl.actor import build, digest

    if wrong == "digest":
        monkeypatch.setattr(mended, "DEVICE", "meta")  # another answer than the host's
        monkeypatch.setattr(digest, "digest_tensors", lambda tensors, device: str(device))
        monkeypatch.setattr(mended, "check_adam", lambda row: None)
        monkeypatch.setattr(mended, "check_peak_memory", lambda row: None)
        assert "digest on the device" in failing("mended", mended.check_mended)
    else:

        def forget(optimizer, device):
            optimizer.param_groups[0]["lr"] = 0.0

        monkeypatch.setattr(build, "step_in_one_kernel", forget)
        assert "error of two steps" in failing("mended", mended.check_mended)


@pytest.mark.slow
def test_peers_and_windows_compare_medians_of_the_counted_batches(monkeypatch, tmp_path):
    def rows(seconds):
        parts = {"generate": 1.0, "tokens": 30.0}
        return {"rows": [{"seconds": 99.0, **parts}, *({"seconds": s, **parts} for s in seconds)],
                "peak_gib": 1.0}  # fmt: skip

    trl = against_trl
    monkeypatch.setattr(trl, "TRL", tmp_path / "absent")
    assert run_row("peers", peers.check_peers).status == "skipped"
    monkeypatch.setattr(trl, "make_task", lambda size: tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr(trl, "TRL", tmp_path)
    monkeypatch.setattr(trl, "run_trl", lambda *_: rows([8.0, 8.0]))
    monkeypatch.setattr(
        trl,
        "run_ours",
        lambda *_, further=(): rows([2.0 if "behavior=engine" in further else 4.0] * 2),
    )
    found = {}
    for check in (peers.check_peers, peers.check_windows):
        made = run_row("x", check)
        assert made.status == "ok", made.detail
        found |= {one["what"]: one["value"] for one in made.measures}
    assert found["seconds of TRL / of this system"] == 2.0 and found["verl"] == "verl needs CUDA"
    assert found["seconds whole / in windows of 16"] == 2.0


def test_settings_of_windows_on_a_gpu_fit_whole_responses():
    """Whole responses of the size fit into a pack, and each window is shorter than they are."""
    from megatron_rl.config import load_config

    tokens = against_trl.SIZES[peers.TAILS["cuda"]].tokens
    assert peers.WINDOWS["cuda"] == (8192, 4096)
    for window in peers.WINDOWS["cuda"]:
        config = load_config(
            against_trl.ROOT / "examples" / "pnpo" / "quickstart.yaml",
            [f"rollout.max_response_tokens={tokens}", "parallel.context=1", *peers.ROOM["cuda"],
             *peers.windows_of(window)],
        )  # fmt: skip
        assert config.lag.partial_rollouts["every_tokens"] == window < tokens
        assert config.trainer.tokens_per_micro_batch >= config.data.max_prompt_tokens + tokens


def test_runs_of_all_sizes_have_names():
    names = [against_trl.run_name(size, layout) for size in against_trl.SIZES
             for layout in against_trl.LAYOUTS]  # fmt: skip
    assert len({*map(TypeAdapter(Name).validate_python, names)}) == len(names)


def test_peers_compare_with_verl_where_it_is_installed(monkeypatch, tmp_path):
    row = {"generate": 1.0, "tokens": 30.0}
    monkeypatch.setattr(against_trl, "TRL", tmp_path / "absent")
    monkeypatch.setattr(against_trl, "make_task", lambda size: tmp_path)
    for name, seconds in (("run_ours", 4.0), ("run", 6.0)):
        result = {"rows": [{"seconds": seconds, **row}] * 3, "peak_gib": 1.0}
        module = against_trl if name == "run_ours" else peers.verl_side
        monkeypatch.setattr(module, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(peers.verl_side, "missing", lambda **_: None)
    made = run_row("peers", peers.check_peers)
    found = {one["what"]: one["value"] for one in made.measures}
    assert found["seconds of verl / of this system"] == 1.5
    assert "against_trl.py install" in found["TRL"]


def test_checks_without_their_requirements_are_skipped():
    assert row.DEVICE == "cpu"
    for check in (numerics.check_memory, actors.check_transformer_engine, actors.check_fp8,
                  speed.check_update_fp8):  # fmt: skip
        assert run_row("x", check).status == "skipped"


def test_compiled_kernels_equal_those_in_use():
    for check in (candidates.check_heads, candidates.check_swiglu):
        made = run_row("x", check)
        assert made.status == "ok", made.line()
    values = {one["what"]: one["value"] for one in made.measures}
    assert values["gradient's difference"] == 0.0


def test_variants_of_attention_make_as_many_forward_passes_as_named():
    made = run_row("x", candidates.check_attention_kept)
    assert made.status == "ok", made.line()
    assert len(made.measures) == 2 * len(candidates.ATTENTIONS)
    inputs = candidates.attention_inputs(
        candidates.SEQUENCES, torch.float32, *candidates.HEADS_AND_SIZE
    )
    results = {}
    for name, (passes, attention) in candidates.ATTENTIONS.items():
        with torch.profiler.profile() as profile:
            results[name] = torch.autograd.grad(attention(inputs).square().sum(), inputs)
        kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
        events = sum(event.name == kernel for event in profile.events())
        # What chooses the kept tensors intercepts two calls, and passes on the first.
        assert events == passes + 2 * ("by the recomputed" in name), name
    wanted = results.pop("in use")
    for name, got in results.items():
        # Sums over the queries of a group may be in another order.
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True)), name


def test_candidate_with_other_gradient_fails(monkeypatch):
    def wrong(logits, log_sum, gain):
        return (logits - log_sum[:, None]).exp() * (2 * gain[:, None])

    monkeypatch.setattr(candidates, "fused_gradient", wrong)
    assert "compiled tiles, gradient's difference" in failing("heads", candidates.check_heads)
    from megatron_rl.distributed import vocab_parallel

    assert vocab_parallel._softmax_gradient.__module__ == vocab_parallel.__name__  # put back


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"ratio/first_minibatch_max_deviation": 1e-7}, "first ratio - 1"),
        ({"mismatch/logprob_abs_diff_mean": 0.5}, "log-prob gap"),
    ],
)
def test_rows_of_runs_fail_if_inexact(change, output):
    good = {"ratio/first_minibatch_max_deviation": 0.0, "mismatch/logprob_abs_diff_mean": 0.01,
            "time/step": 1.0, "reward/mean": 0.5, "memory/train_peak_gib": 1.0}  # fmt: skip
    runs._judge(Row("x"), "LoRA", [good, good])
    with pytest.raises(AssertionError, match=output):
        runs._judge(Row("x"), "LoRA", [{**good, **change}, good])
