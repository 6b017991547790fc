"""The shape of the code base: which way imports go, who may import what, and how big things get."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
FILES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((PACKAGE.parent / "tools").rglob("*.py"))
MAX_FUNCTION_LINES = 60

# Each package and the packages of ours that it may import, lowest first. What trains imports no
# app:
# `test_training_code_imports_no_app` checks that apart from this table.
LAYERS = {
    "errors": set(),  # every package may import it
    "columns": set(),
    "types": {"columns"},
    "texts": set(),
    "fields": set(),
    "messages": {"texts", "fields"},
    "runtime": set(),
    "models": set(),
    "distributed": {"types", "runtime"},
    "advantages": {"types"},
    "objectives": {"types", "distributed"},
    "config": {"objectives"},
    "workers": {"texts", "runtime"},
    "rewards": {"types", "texts", "config", "workers"},
    "environments": {"types", "texts", "messages", "fields", "config", "rewards", "workers"},
    "data": {
        "types", "columns", "texts", "messages", "fields", "config", "runtime", "distributed",
        "rewards",
    },
    "resharding": {"types", "runtime", "config", "distributed", "models"},
    "actor": {
        "types", "runtime", "config", "distributed", "objectives", "models", "resharding", "data",
    },
    "engine": {
        "types", "columns", "runtime", "config", "distributed", "models", "resharding", "data",
        "environments",
    },
    "runs": {"types", "columns", "runtime", "config", "models", "data"},
    "telemetry": {"types", "runtime", "distributed", "config", "runs", "objectives"},
    "rollouts": {
        "types", "columns", "runtime", "config", "distributed", "objectives", "advantages", "data",
        "rewards", "models", "resharding", "actor", "engine", "telemetry", "runs", "messages",
        "environments", "workers", "fields",
    },
    "preflight": {"types", "runtime", "config", "data", "objectives", "models", "resharding",
                  "engine", "runs", "rewards", "rollouts", "environments", "workers",
                  "messages"},
    "checkpoint_export": {
        "config", "telemetry", "models", "resharding", "actor", "preflight", "runs",
    },
    "trainer": {
        "types", "runtime", "config", "distributed", "objectives", "data", "rewards", "models",
        "resharding", "actor", "engine", "runs", "telemetry", "rollouts", "preflight",
        "environments",
    },
    "apps.launch": {"config", "runs", "runtime"},
    "apps.tasks": {"runtime"},
    "apps.report": {"types", "runs", "objectives", "distributed", "telemetry"},
    "apps.planning": {
        "types", "columns", "runs", "config", "distributed", "objectives", "data", "models",
        "resharding", "actor", "preflight", "trainer", "runtime",
    },
    "commands": {
        "types", "config", "data", "telemetry", "runtime", "trainer", "preflight", "runs",
        "checkpoint_export", "models", "engine", "apps.launch", "apps.tasks", "apps.planning",
        "apps.report", "rewards",
    },
    "python_api": {"config", "runtime", "commands", "runs"},
    "cli": {"config", "runtime", "commands"},
    "__init__": {"config", "python_api"},
}  # fmt: skip
ONLY_IMPORTER = {"megatron": "actor", "vllm": "engine", "nemo_run": "apps.launch"}
NEED_ONLY_TORCH = {"objectives", "advantages", "distributed"}
THIRD_PARTY_OF_TORCH_ONLY = {"torch", "megatron_rl"}


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return part_named(relative.with_suffix("").parts)


def part_named(parts: tuple[str, ...]) -> str:
    """The package of a module; each of the apps counts for itself."""
    return ".".join(parts[: 2 if parts[0] == "apps" else 1])


class Contents(NamedTuple):
    """Imports and faults of a file."""

    imports: set[str]
    long_functions: list[str]  # line, name and number of lines
    texts_of_the_locale: list[int]  # lines


@cache
def contents_of(file: Path) -> Contents:
    contents = Contents(set(), [], [])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            contents.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            contents.imports.add(node.module)
            contents.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (size := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                contents.long_functions.append(f"{node.lineno} {node.name}: {size}")
        elif isinstance(node, ast.Call) and is_text_of_the_locale(node):
            contents.texts_of_the_locale.append(node.lineno)
    return contents


def test_every_package_is_placed_in_layers():
    parts = {part_of(file) for file in FILES} - {"apps.__init__"}
    assert parts <= set(LAYERS)


def test_every_package_is_in_code_layout():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = page.partition("## Code layout")[2].partition("## Contracts")[0]
    names = [name.replace(".", "/") for name in LAYERS if name != "__init__"]
    assert [
        name for name in names if f"`{name}/`" not in table and f"`{name}.py`" not in table
    ] == []


def test_imports_go_one_way():
    wrong = []
    for file in FILES:
        part = part_of(file)
        for name in contents_of(file).imports:
            if not name.startswith("megatron_rl."):
                continue
            target = part_named(tuple(name.split(".")[1:]))
            if target in LAYERS and target not in LAYERS.get(part, set()) | {part, "errors"}:
                wrong.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_training_code_imports_no_app():
    leaves = {"commands", "cli", "python_api", "__init__"}
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        if part_of(file) not in leaves and not part_of(file).startswith("apps.")
        for name in contents_of(file).imports
        if name.startswith(("megatron_rl.apps", "megatron_rl.commands"))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_between_files_are_acyclic():
    files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
             for file in FILES}  # fmt: skip
    graph = {name: {one for one in contents_of(file).imports if one in files and one != name}
             for name, file in files.items()}  # fmt: skip
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_single_importers():
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        for name in contents_of(file).imports
        if (owner := ONLY_IMPORTER.get(name.split(".")[0])) and part_of(file) != owner
    ]
    assert not wrong, "\n".join(wrong)


def test_mathematics_needs_only_torch():
    import sys

    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        if part_of(file) in NEED_ONLY_TORCH
        for name in contents_of(file).imports
        if (top := name.split(".")[0]) not in THIRD_PARTY_OF_TORCH_ONLY
        and top not in sys.stdlib_module_names
    ]
    assert not wrong, "\n".join(wrong)


def test_objectives_never_see_rank():
    words = ("rank", "world_size", "torch.distributed", "all_reduce", "all_gather")
    wrong = []
    for file in FILES:
        if part_of(file) not in {"objectives", "advantages"}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
            found = any(word in str(name).split("_") or word == name for word in words)
            if found and name != "all_reduce":  # Statistics.all_reduce is asked for by the actor
                wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def test_sizes():
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{each}"
        for file in [*FILES, *TOOLS]
        for each in contents_of(file).long_functions
    ]
    assert not wrong, "\n".join(wrong)


def is_text_of_the_locale(call: ast.Call) -> bool:
    """True if a call reads or writes text in the encoding of the terminal's locale."""
    given = {keyword.arg for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    is_text = name in ("read_text", "write_text") or (
        name in ("run", "Popen") and "text" in given
    ) or (
        name in ("open", "fdopen")
        and any(str(one) and set(str(one)) <= set("rwaxt+") for one in modes)
    )  # fmt: skip
    return is_text and "encoding" not in given


def test_files_are_utf8_on_every_terminal():
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} has no encoding"
        for file in FILES
        for line in contents_of(file).texts_of_the_locale
    ]
    assert not wrong, "\n".join(wrong)
