"""Description of the runs of a report: their model, task, start, version and command."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.apps.report.runs import Run

MOST = 3  # values of several runs that are listed


def describe_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """List name, distinct values and number of further ones of what identifies these runs."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _describe(run).items():
            found.setdefault(name, {}).setdefault(value)
    if len(runs) > 1 and len(found.get("Command", {})) > 1:
        del found["Command"]  # every run has its own; the settings list what differs
    return [
        {"name": name, "values": list(values)[:MOST], "more": max(0, len(values) - MOST)}
        for name, values in found.items()
    ]


def _describe(run: Run) -> dict[str, str]:
    config, start = run.config, run.starts[0] if run.starts else {}
    model, data = config.get("model") or {}, config.get("data") or {}
    verifier = (config.get("reward") or {}).get("verifier")
    environment = (config.get("environment") or {}).get("name")
    graded = f"played in {environment}" if environment else f"graded by {verifier}"
    mixed = [each["path"] for each in (data.get("mix") or {}).values()]
    files = [data["train"]] if data.get("train") else mixed
    task = [f"prompts of {', '.join(map(_short, files))}"] if files else []
    task += [graded] if environment or verifier else []
    sets = ", ".join((config.get("eval") or {}).get("sets") or {})
    task += [f"held-out sets {sets}"] if sets else []
    written = run.folder / "metrics.jsonl"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written.stat().st_mtime))
    command = start.get("command") or f"megatron-rl train --config {run.folder / 'config.yaml'}"
    return {
        **({"Model": _short(model["path"])} if model.get("path") else {}),
        **({"Task": ", ".join(task)} if task else {}),
        "Started" if start else "Last written": start.get("time", date),
        "Version": f"megatron_rl {start.get('version', 'not recorded')}",
        "Command": command,
    }


def _short(path: str) -> str:
    """Return the last two parts of a path: a folder and its parent name a model or a file."""
    return "/".join(Path(path).parts[-2:])
