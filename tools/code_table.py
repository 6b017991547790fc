"""Print sizes, imports and wording of megatron_rl/ at one commit and in this tree.

    python tools/code_table.py [REVISION]

A package is a folder or module directly under megatron_rl/; imports count once for each pair.
"""

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from code_growth import print_growth
from plain_words import count

ROOT = Path(__file__).parents[1]
APPS = {"launch", "planning", "report", "study", "tasks"}


def measure(package: Path) -> tuple[Counter[str], Counter[str], dict[str, int]]:
    files, lines, pairs = Counter[str](), Counter[str](), set()
    for file in sorted(package.rglob("*.py")):
        source, parts = file.read_text(), file.relative_to(package).with_suffix("").parts
        row = ".".join(parts[: 2 if parts[0] == "apps" else 1])
        files[row] += 1
        lines[row] += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_rl."):
                pairs.add((parts[0], str(node.module).split(".")[1]))
    pairs = {(one, other) for one, other in pairs if one != other}
    reach = set(pairs)
    while more := {(a, d) for a, b in reach for c, d in pairs if b == c} - reach:
        reach |= more
    core = sum(size for name, size in lines.items() if name.split(".")[-1] not in APPS)
    openings, phrases, verbs = count(package)
    functions = [
        (node.end_lineno - node.lineno + 1, node.name)
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return files, lines, {
        "packages": len({name.split(".")[0] for name in files}),
        "files": files.total(), "lines": lines.total(), "lines without the apps": core,
        "imports between packages": len(pairs),
        "of these circular": sum((b, a) in reach for a, b in pairs),
        "longest file": max(file.read_text().count("\n") for file in package.rglob("*.py")),
        "longest function": max(functions)[0],
        "lines of `run_step`": max(size for size, name in functions if name == "run_step"),
        "docstrings that open with What, Which, ...": openings, "other phrases to avoid": phrases,
        "say, tell, hear, hold, look in docstrings and comments": verbs,
    }  # fmt: skip


def main(revision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "archive", revision, "megatron_rl"], cwd=ROOT)
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        old, new = (measure(root / "megatron_rl") for root in (Path(folder), ROOT))
    print(f"| | {revision} | now |\n|---|---|---|")
    for name in new[2]:
        print(f"| {name} | {old[2][name]:,} | {new[2][name]:,} |")
    print(f"\n| package | files, lines at {revision} | files, lines now |\n|---|---|---|")
    for name in sorted(old[0].keys() | new[0].keys()):
        cells = [f"{a[name]}, {b[name]:,}" if a[name] else "" for a, b, _ in (old, new)]
        print(f"| `{name}` | {' | '.join(cells)} |")
    print_growth(revision)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "36a86f1")
