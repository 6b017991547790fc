"""GPU check of this project in under ten minutes, with a table and a JSON report.

    bash tools/gpu_check.sh [--only ROW ...] [--output gpu_check.json]

Prints one row per check with measured values and bounds; exits with 1 if any check fails. Each
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
from pathlib import Path

from megatron_rl.runtime.processes import quiet_libraries
from tools.gpu_check import actors, dry_run, engine, machine, numerics, speed
from tools.gpu_check.row import DEVICE, Row, run_row

FAMILIES = (
    ("machine", 240, (machine.check_machine, machine.check_two_devices)),
    (
        "numerics",
        180,
        (
            numerics.check_groups,
            numerics.check_objective,
            numerics.check_head,
            numerics.check_attention,
            numerics.check_chunks,
            numerics.check_memory,
        ),
    ),
    (
        "actors",
        240,
        (
            actors.check_parity,
            actors.check_update,
            actors.check_transformer_engine,
            actors.check_fp8,
        ),
    ),
    ("dry_run", 240, (dry_run.check_dry_run,)),
    ("speed", 240, (speed.check_update_16k, speed.check_update_32k)),
    ("engine", 360, (engine.check_engine,)),  # the first start compiles for minutes
    ("quickstart", 360, (engine.check_quickstart,)),
)


def _name(check):
    return check.__name__.removeprefix("check_")


NAMES = [_name(check) for _, _, checks in FAMILIES for check in checks]


def main():
    """Run the families in order, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="ROW")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # set in a family's process
    arguments = parser.parse_args()
    if arguments.here:
        _run_here(arguments.only, arguments.here)
        return
    print(f"{'check':<19} {'status':<8} {'seconds':>6}  measured", flush=True)
    start, rows = time.monotonic(), []
    for _, limit, checks in FAMILIES:
        wanted = [_name(check) for check in checks if _name(check) in arguments.only]
        if wanted:
            rows += _run_family(wanted, limit)
    failed = [row.name for row in rows if row.status == "FAILED"]
    report = {
        "verdict": "failed: " + ", ".join(failed) if failed else "ok",
        "device": DEVICE,
        "seconds": time.monotonic() - start,
        "system": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "versions": machine.versions(),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{report['verdict']}; {report['seconds']:.0f} s; the full report is in {arguments.output}"
    )
    sys.exit(bool(failed))


def _run_here(names, answers):
    quiet_libraries()
    checks = {_name(check): check for _, _, checks in FAMILIES for check in checks}
    for name in names:
        row = run_row(name, checks[name])
        with answers.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _run_family(names, limit):
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
            status = subprocess.run(command, timeout=limit, stdout=sys.stderr, check=False)
            died = f"its process exited with status {status.returncode}"
        except subprocess.TimeoutExpired:
            died = f"no answer in {limit} s"
        lines = answers.read_text().splitlines() if answers.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]
    owed = names[len(rows) :]
    rows += [Row(name, status="FAILED", detail=died) for name in owed]
    for row in rows:
        print(row.line(), flush=True)
    return rows


if __name__ == "__main__":
    main()
