"""The shape of the code base: which way imports go, who may import what, and how big things get."""

import ast
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Each package and the packages of ours that it may import, lowest first.
LAYERS = {
    "types": set(),
    "seeds": set(),
    "interruption": set(),
    "processes": {"interruption"},
    "peak_memory": set(),
    "console": set(),
    "watching": set(),
    "versions": set(),
    "config": {"objectives"},
    "distributed": {"types"},
    "objectives": {"types", "distributed"},
    "advantages": {"types"},
    "data": {"types", "seeds", "distributed"},
    "rewards": {"types", "interruption"},
    "models": set(),
    "evaluation": {"types"},
    "resharding": {"types", "distributed", "models"},
    "actor": {"types", "distributed", "objectives", "models", "resharding", "data"},
    "rollout": {"types", "seeds", "processes", "distributed", "models", "resharding", "watching"},
    "runs": {"types", "config", "models"},
    "lag": {"types", "seeds", "config"},
    "report": {"types", "runs", "objectives", "distributed"},
    "preflight": {"config", "data", "objectives", "models", "resharding", "rollout", "runs",
                  "lag"},
    "planning": {
        "types", "config", "distributed", "objectives", "data", "models", "resharding", "actor",
        "preflight",
    },
    "conversion": {"config", "console", "models", "resharding", "actor", "preflight", "runs"},
    "trainer": {
        "types", "seeds", "peak_memory", "interruption", "console", "config", "distributed",
        "objectives", "advantages", "data", "rewards", "models", "resharding", "actor", "rollout",
        "evaluation", "runs", "report", "preflight", "planning", "lag", "watching",
    },
    "launch": {"config", "runs"},
    "tasks": {"runs"},
    "study": {"config", "interruption", "launch", "runs", "tasks"},
    "commands": {
        "config", "console", "interruption", "processes", "trainer", "conversion", "preflight",
        "runs", "launch", "study", "tasks", "versions", "models", "planning", "rollout",
        "report",
    },
    "cli": {"config", "processes", "commands"},
}  # fmt: skip
ONLY_IMPORTER = {"megatron": "actor", "vllm": "rollout", "nemo_run": "launch"}
NEED_ONLY_TORCH = {"objectives", "advantages", "distributed"}
THIRD_PARTY_OF_TORCH_ONLY = {"torch", "megatron_rl"}


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@lru_cache
def imports_of(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_is_placed_in_the_layers():
    assert {part_of(file) for file in FILES} - {"__init__"} <= set(LAYERS)


def test_imports_go_one_way():
    wrong = []
    for file in FILES:
        part = part_of(file)
        for name in imports_of(file):
            if not name.startswith("megatron_rl."):
                continue
            target = name.split(".")[1]
            if target in LAYERS and target != part and target not in LAYERS.get(part, set()):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_in_a_circle():
    files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
             for file in FILES}  # fmt: skip
    graph = {name: {one for one in imports_of(file) if one in files and one != name}
             for name, file in files.items()}  # fmt: skip
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_single_importers():
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        for name in imports_of(file)
        if (owner := ONLY_IMPORTER.get(name.split(".")[0])) and part_of(file) != owner
    ]
    assert not wrong, "\n".join(wrong)


def test_the_mathematics_needs_only_torch():
    import sys

    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        if part_of(file) in NEED_ONLY_TORCH
        for name in imports_of(file)
        if (top := name.split(".")[0]) not in THIRD_PARTY_OF_TORCH_ONLY
        and top not in sys.stdlib_module_names
    ]
    assert not wrong, "\n".join(wrong)


def test_objectives_never_see_a_rank():
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
    wrong = []
    for file in FILES:
        text = file.read_text()
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            wrong.append(f"{file.relative_to(PACKAGE)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if (size := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {node.name}: {size}")
    assert not wrong, "\n".join(wrong)
