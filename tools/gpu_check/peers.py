"""A training step next to TRL's and verl's, and partial rollouts next to whole ones."""

import statistics

from tools.benchmarks import against_trl, verl_side
from tools.gpu_check.row import DEVICE, Skipped

BATCHES = 3  # of which the first is not counted
LAYOUT = "one process"
# Windows of check_windows (tokens between two weight syncs), its size, and settings that both have:
# responses of several steps are unfinished at once, and one epoch keeps updates from hiding
# generation.
WINDOWS = {"cuda": (8192, 4096), "cpu": (16,)}
TAILS = {"cuda": "1.5b, long tails", "cpu": "quickstart"}
FURTHER = {
    "cuda": ("trainer.tokens_per_micro_batch=16896", "trainer.recompute=full"),
    "cpu": ("rollout.kv_cache_mib=512",),
}
ROOM = {device: ("rollout.max_num_seqs=2048", "trainer.epochs=1", *further)
        for device, further in FURTHER.items()}  # fmt: skip


def check_peers(row):
    """Time rollout batches of 4 epochs of each system: same model, prompts, lengths, updates."""
    lacking = {
        "TRL": _trl_is_missing(),
        "verl": verl_side.missing(on_cuda=DEVICE == "cuda"),
    }
    peers = [name for name, reason in lacking.items() if reason is None]
    if not peers:
        raise Skipped("; ".join(lacking.values()))
    size = "1.5b" if DEVICE == "cuda" else "quickstart"
    task = against_trl.make_task(size)
    seconds = {name: _note(row, name, _run(size, task, name)) for name in (*peers, LAYOUT)}
    for name, reason in lacking.items():
        if reason is None:
            row.note(f"seconds of {name} / of this system", seconds[name] / seconds[LAYOUT])
        else:
            row.note(name, reason)


def _trl_is_missing():
    if (against_trl.TRL / "bin" / "python").exists():
        return None
    return "TRL is not installed: python tools/benchmarks/against_trl.py install"


def check_windows(row):
    """Time steps with lengths of a long tail: whole responses, then windows of some tokens."""
    size = TAILS[DEVICE]
    task = against_trl.make_task(size)
    seconds = {0: _note(row, "whole", _run(size, task, LAYOUT, further=ROOM[DEVICE]))}
    for tokens in WINDOWS[DEVICE]:
        result = _run(size, task, LAYOUT, further=(*ROOM[DEVICE], *windows_of(tokens)))
        seconds[tokens] = _note(row, f"windows of {tokens}", result)
        row.note(f"seconds whole / in windows of {tokens}", seconds[0] / seconds[tokens])


def windows_of(tokens):
    """Settings of partial rollouts in windows of so many tokens."""
    return (f"lag.partial_rollouts={{every_tokens: {tokens}, cache: keep}}", "behavior=engine")


def _run(size, task, system, **options):
    if system == "TRL":
        return against_trl.run_trl(size, task, BATCHES)
    if system == "verl":
        return verl_side.run(task, against_trl.peer_settings(size, BATCHES))
    return against_trl.run_ours(size, task, BATCHES, system, **options)


def _note(row, name, result):
    """Note medians over the counted batches; return the seconds of one."""
    rows = result["rows"][1:]
    seconds, generate, tokens = (
        statistics.median(one[key] for one in rows) for key in ("seconds", "generate", "tokens")
    )
    row.note(f"{name}: seconds a batch", seconds)
    row.note(f"{name}: of it generation", generate)
    row.note(f"{name}: mean tokens of a response", tokens)
    row.note(f"{name}: host GiB", result["peak_gib"])
    return seconds
