"""Lines of the training core by what they serve, from git's history; part of tools/code_table.py.

A new capability has files of its own (FILES: their growth since the first revision) and commits
(COMMITS, by words of the subject: their net lines in all other files of the core). The rest is what
existed before. The rule overestimates the rest: lines that the reorganization added to other files
for a new capability count as existing ones.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
REORGANIZATION = "f1fa9a9"  # one commit with several capabilities: counted by files alone
KINDS = ("lines", "code", "docstrings", "comments", "blank")
APPS = ("apps/*", "launch/*", "planning/*", "report/*", "study/*", "tasks/*")
COMMANDS = "commands of the apps, dry run (not in the first row)"
FILES = {
    "conversations, tools and agents": "environments/* engine/conversations.py data/turns.py "
    "trainer/conversations.py config/environment_section.py preflight/environment.py",
    "LoRA": "actor/lora.py actor/adapter_files.py models/adapters.py config/lora_section.py",
    "objectives, calibrated bounds, a loss of your own": "objectives/calibration.py "
    "objectives/tolerances.py objectives/function.py objectives/function_spec.py "
    "objectives/constraints.py objectives/named.py",
    "checks before a run, causes of failures, warnings": "preflight/start.py preflight/verifier.py "
    "preflight/__main__.py preflight/settings.py preflight/disk.py models/safetensors_headers.py "
    "runtime/failures.py commands/ending.py trainer/learning_check.py",
    "names on the hub, several rewards, Python, `rollouts`": "preflight/hub_names.py data/hub.py "
    "rewards/named.py python_api.py __init__.py commands/rollouts.py runs/rollouts.py",
    COMMANDS: "commands/launch.py commands/plan.py commands/report.py "
    "commands/study.py commands/task.py commands/dry_run.py commands/rehearse.py "
    "actor/dry_run*.py actor/rehearsal*.py",
}  # fmt: skip
COMMITS = {
    "conversations, tools and agents": "onversation|Environments in|Agents that|ournal|histories|"
    "functions as tools|observations|MCP|environment a module",
    "LoRA": "LoRA",
    "many ranks": "[Pp]ush|many ranks|owners|on the host|mapped file|when they are trained|"
    "[Uu]neven|Experts are written|on the rank that generated|routes by pattern",
    "architectures": "Mistral|GLM|Gemma|gpt-oss|DeepSeek|Moonlight|sliding",
    "replayed routes of experts": "[Rr]outes|[Rr]outing",
    "kernels and the memory check": "emory check|Transformer Engine's|Hops|scan is|float32|"
    "unmeasured|copies are complete|Dry run and",
}  # fmt: skip


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


def classify_lines(source: str) -> Counter[str]:
    """Count the lines of a file: blank, comments, docstrings, and code (all others)."""
    lines, kinds = source.splitlines(), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            kinds |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), "docstrings")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            kinds[token.start[0]] = "comments"
    rest = ("blank" if not line.strip() else "code" for line in lines)
    counts = Counter(kinds.get(number, kind) for number, kind in enumerate(rest, 1))
    return counts + Counter(lines=len(lines))


def is_core(path: str) -> bool:
    name = path.removeprefix("megatron_rl/")
    return name.endswith(".py") and not any(fnmatch(name, pattern) for pattern in APPS)


def group_of(path: str) -> str | None:
    name = path.removeprefix("megatron_rl/")
    return next(
        (group for group, files in FILES.items() if any(fnmatch(name, p) for p in files.split())),
        None,
    )


def read_core(revision: str) -> dict[str, Counter[str]]:
    paths = git("ls-tree", "-r", "--name-only", revision, "megatron_rl").split()
    return {p: classify_lines(git("show", f"{revision}:{p}")) for p in paths if is_core(p)}


def net_lines(revision: str) -> Counter[str]:
    """Return the lines of the core outside FILES that a commit added, minus those removed."""
    net = Counter()
    for path in git("diff", "--no-renames", "--name-only", f"{revision}~", revision).split():
        if path.startswith("megatron_rl/") and is_core(path) and not group_of(path):
            for side, sign in ((revision, 1), (f"{revision}~", -1)):
                if git("ls-tree", side, path):
                    for kind, lines in classify_lines(git("show", f"{side}:{path}")).items():
                        net[kind] += sign * lines
    return net


def growth(revision: str) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Return the core at the revision without the apps' commands, and today's lines by group."""
    old, head = read_core(revision), git("ls-files", "megatron_rl").split()
    new = {p: classify_lines((ROOT / p).read_text()) for p in head if is_core(p)}
    before, groups = sum(old.values(), Counter()), {group: Counter() for group in FILES | COMMITS}
    for path in old | new:
        if group := group_of(path):
            groups[group].update(new.get(path, {}))
            (before if group == COMMANDS else groups[group]).subtract(old.get(path, {}))
    log = git("log", "--format=%h %s", f"{REORGANIZATION}..HEAD", "--", "megatron_rl")
    for commit, subject in (line.split(" ", 1) for line in log.splitlines()):
        if group := next((g for g, words in COMMITS.items() if re.search(words, subject)), None):
            groups[group].update(net_lines(commit))
    rest = sum(new.values(), Counter())
    for lines in groups.values():
        rest.subtract(lines)
    return before, {f"what existed at {revision}": rest} | groups


def print_growth(revision: str) -> None:
    before, groups = growth(revision)
    total = Counter()
    for lines in groups.values():
        total.update(lines)
    print(f"\n| core | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for name, lines in {f"all at {revision}": before, **groups, "all now": total}.items():
        print(f"| {name} | {' | '.join(f'{lines[kind]:,}' for kind in KINDS)} |")


if __name__ == "__main__":
    print_growth("36a86f1")
