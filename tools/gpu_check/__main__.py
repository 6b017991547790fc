"""GPU check of this project, with a table and a JSON report.

    bash tools/gpu_check.sh [--only ROW ...] [--budget 25m] [--output gpu_check.json]

Prints one row per check with measured values and bounds; exits with 1 if any check fails. Rows run
in the order of their value per minute; with a budget, rows that no longer fit are skipped. Each
family of rows runs in its own process, so that a crash or hang affects only its rows. Without a
CUDA device the same checks run on the CPU at small sizes, which tests only the script; checks that
need a GPU are skipped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

from megatron_rl.runtime.processes import quiet_libraries
from tools.gpu_check import machine
from tools.gpu_check.order import LONG, ORDER, families, fitting, limit, parse_budget
from tools.gpu_check.row import DEVICE, Row, run_row

NAMES = [row.name for row in ORDER]


def main():
    """Run the families in order, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = f"Default: all; without a budget not {' and '.join(LONG)}."
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="ROW", help=default)
    parser.add_argument("--list", action="store_true", help="Print what each row checks.")
    parser.add_argument("--budget", type=parse_budget, help="Seconds, or 90s, 25m, 1h.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # set in a family's process
    arguments = parser.parse_args()
    if arguments.list:
        for row in ORDER:
            when = " (with --budget or --only)" if row.name in LONG else ""
            print(f"{row.name:<19} {(row.check.__doc__ or '').splitlines()[0]}{when}")
        return
    names = arguments.only or [n for n in NAMES if arguments.budget or n not in LONG]
    if arguments.here:
        _run_here(names, arguments.here)
        return
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the families' processes
    print(f"{'check':<19} {'status':<8} {'seconds':>6}  measured", flush=True)
    start = time.monotonic()
    rows = run_rows([row for row in ORDER if row.name in names], arguments.budget)
    failed = [row.name for row in rows if row.status == "FAILED"]
    report = {
        "verdict": "failed: " + ", ".join(failed) if failed else "ok",
        "date": date.today().isoformat(),
        "device": arguments.device,
        "seconds": time.monotonic() - start,
        "budget": arguments.budget,
        "system": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "versions": machine.versions(),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"{report['verdict']}; {report['seconds']:.0f} s; the full report is in {arguments.output}"
    )
    sys.exit(bool(failed))


def run_rows(planned, budget):
    """Run the rows that fit into the budget, if there is one; print and return all of them."""
    end = time.monotonic() + (budget or float("inf"))
    rows = []
    for family in families(planned):
        left = end - time.monotonic()
        chosen = fitting(family, left)
        if chosen:
            rows += _run_family([row.name for row in chosen], min(limit(chosen), left))
        for row in family[len(chosen) :]:
            reason = f"needs about {row.seconds:.0f} s and a start; {left:.0f} s of the budget left"
            rows.append(Row(row.name, status="skipped", detail=reason))
            print(rows[-1].line(), flush=True)
    return rows


def _run_here(names, answers):
    quiet_libraries()
    for planned in ORDER:
        if planned.name not in names:
            continue
        row = run_row(planned.name, planned.check)
        with answers.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _run_family(names, seconds):
    """Run one family in its own process and return its rows; missing rows count as failed."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "rows.jsonl"
        command = [
            sys.executable,
            "-m",
            "tools.gpu_check",
            "--here",
            str(answers),
            "--only",
            *names,
        ]
        try:
            status = subprocess.run(command, timeout=seconds, stdout=sys.stderr, check=False)
            died = f"its process exited with status {status.returncode}"
        except subprocess.TimeoutExpired:
            died = f"no answer in {seconds:.0f} s"
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]
    owed = names[len(rows) :]
    rows += [Row(name, status="FAILED", detail=died) for name in owed]
    for row in rows:
        print(row.line(), flush=True)
    return rows


if __name__ == "__main__":
    main()
