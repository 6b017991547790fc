"""Contents of what a run reads from outside: prompts, user code and models.

A run directory records them at each start, so that a resumed run notices that a file has changed.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.data.hub import is_on_hub
from megatron_rl.data.rows import count_rows
from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import model_fingerprint

# Files of a model folder that decide how prompts are written and where responses end.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.jinja", "added_tokens.json",
                   "special_tokens_map.json", "generation_config.json", "tekken.json",
                   "*.tiktoken", "tokenization*.py", "chat_template.json",
                   "additional_chat_templates/*.jinja")  # fmt: skip
_CACHES = "cache-"  # files that `datasets` writes into a saved set while it is used
WEIGHTS = "config.json and weights"  # in the place of a file, for models
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


@dataclass(frozen=True)
class Input:
    """The content of one input, named by its setting."""

    name: str  # the setting's value: a path, or module:function
    files: dict[str, str]  # digest of each file, by its name below that path, or by its module
    bytes: int
    rows: int | None = None  # of a file of prompts

    def has_content_of(self, other: "Input") -> bool:
        """Return True if both have the same bytes in the same order of files; names may differ.

        Of code, modules may be called otherwise, and the function may not. Tokenizers and models
        are read by the names of their files.
        """
        if self.is_code or other.is_code:
            functions = {one.name.partition(":")[2] for one in (self, other)}
            mine, theirs = sorted(self.files.values()), sorted(other.files.values())
            return len(functions) == 1 and mine == theirs
        if WEIGHTS in self.files or WEIGHTS in other.files:
            return self.files == other.files
        return [*self.files.values()] == [*other.files.values()]

    @property
    def is_code(self) -> bool:
        """True if it is named as module:function."""
        return re.fullmatch(r"[\w.]+:[\w.]+", self.name) is not None

    def size(self) -> str:
        """Describe the size; a digest follows where sizes are equal."""
        rows = "" if self.rows is None else f"{self.rows:,} rows, "
        return f"{rows}{self.bytes:,} bytes"

    def describe_change(self, now: "Input") -> str:
        """Describe the difference to a later content: size, and the files that differ."""
        names = sorted(
            name
            for name in self.files.keys() | now.files.keys()
            if self.files.get(name) != now.files.get(name)
        )
        short = [
            " -> ".join(one.files.get(name, "none")[:8] for one in (self, now)) for name in names
        ]
        files = ", ".join(f"{name} ({change})" for name, change in zip(names, short, strict=True))
        sizes = f"{self.size()} -> {now.size()}" if self.size() != now.size() else self.size()
        return f"{sizes}; SHA-256 {files}"


Inputs = Mapping[str, Input]  # by setting


def read_inputs(config: Config) -> Inputs:
    """Read the inputs of a run by setting; what does not exist, or has a commit, is left out."""
    found: dict[str, Input] = {}
    for key, (path, _) in config.prompt_files.items():
        if not is_on_hub(path) and Path(path).exists():
            found[key] = read_path(path)
    paths = {"offline.rollouts": config.offline.rollouts}
    for key, name in paths.items():
        if name is not None and Path(str(name)).exists():
            found[key] = read_path(str(name))
    models = {"model.path": config.model.path, **config.given_models,
              "offline.behavior": config.offline.behavior}  # fmt: skip
    for key, name in models.items():
        if (Path(name) / "config.json").is_file():
            found[key] = _read_model(name)
    for key, name in config.code.items():
        files = module_files(name.partition(":")[0])
        if files:
            found[key] = _read_files(name, files)
    return found


def changed_inputs(before: Inputs, now: Inputs) -> dict[str, str]:
    """Describe the inputs of unchanged name and changed content; other names are settings."""
    return {
        key: before[key].describe_change(one)
        for key, one in now.items()
        if key in before and before[key].name == one.name and not one.has_content_of(before[key])
    }


def describe_renamed(before: Inputs, now: Inputs) -> list[str]:
    """Describe files of prompts that have another name and the same content."""
    return [
        f"{key}: {Path(before[key].name).name} is now called {Path(one.name).name}, with the same "
        f"content; rows without data_source are of {Path(one.name).stem} from now on"
        for key, one in now.items()
        if key in before and one.rows is not None and before[key].files.keys() != one.files.keys()
        and one.has_content_of(before[key])
    ]  # fmt: skip


def check_names(accepted: Sequence[str], now: Inputs) -> None:
    """Raise ConfigError if `run.accept_changes` names what is no input of the run."""
    if unknown := [key for key in accepted if key not in now]:
        raise ConfigError(
            f"run.accept_changes: {unknown[0]} is no input of this run; it has {', '.join(now)}"
        )


def check_changes(before: Inputs, now: Inputs, *, accepted: Sequence[str], run: str) -> list[str]:
    """Return a line for each accepted change; raise ConfigError for other changes."""
    check_names(accepted, now)
    changed = changed_inputs(before, now)
    lines = [f"{key}={now[key].name}: {change}" for key, change in changed.items()]
    if refused := [key for key in changed if key not in accepted]:
        raise ConfigError(
            f"inputs of {run} have changed since its last start; restore them, choose another "
            "run.name, or accept and record the changes by "
            f"run.accept_changes=[{', '.join([*accepted, *refused])}]:\n    " + "\n    ".join(lines)
        )
    return [f"changed since the last start, accepted: {line}" for line in lines]


def load_inputs(file: Path) -> Inputs:
    """Load what `dump_inputs` wrote; empty without the file. UserError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: Input(**value) for key, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged ({error}): it has the digests of the run's inputs; restore it, or "
            "remove it, and the next start writes the digests of the inputs as they are then"
        ) from None


def dump_inputs(inputs: Inputs) -> str:
    """Return inputs as JSON text."""
    return json.dumps({key: asdict(one) for key, one in inputs.items()}, indent=1) + "\n"


def read_path(path: str) -> Input:
    """Read a file, or all files of a folder."""
    root = Path(path)
    if root.is_file():
        rows = count_rows(root)
        return _read_files(path, {root.name: root}, rows=int(rows) if rows < float("inf") else None)
    root = root / "rollouts" if (root / "rollouts").is_dir() else root  # of a run, to train on
    files = [
        one for one in sorted(root.rglob("*"))
        if one.is_file() and not one.name.startswith((".", _CACHES))
    ]  # fmt: skip
    return _read_files(path, {str(one.relative_to(root)): one for one in files})


def module_files(module: str) -> dict[str, Path]:
    """Find the source of a module, and of the modules of the user that it imports.

    Modules of this package are left out, and so is what installed packages import.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        package, _, _ = name.rpartition(".")
        if name in found or name.split(".")[0] == "megatron_rl":
            continue
        file = _find_source(name)
        if file is None or (_is_installed(file) and name != module):
            continue
        found[name] = file
        if not _is_installed(file):
            is_package = file.name == "__init__.py"
            waiting += [*_imports(file, package=name if is_package else package)]
            waiting += [package] if package else []
    return found


def _read_model(path: str) -> Input:
    folder = Path(path)
    files = {
        one.name: one for pattern in TOKENIZER_FILES for one in folder.glob(pattern)
        if one.is_file()
    }  # fmt: skip
    found = _read_files(path, files)
    weights = {WEIGHTS: model_fingerprint(path)}
    return Input(path, weights | found.files, found.bytes)


def _read_files(name: str, files: Mapping[str, Path], *, rows: int | None = None) -> Input:
    stats = {key: file.stat() for key, file in files.items()}
    digests = {
        key: _digest(str(file.resolve()), stats[key].st_size, stats[key].st_mtime_ns)
        for key, file in sorted(files.items())
    }
    return Input(name, digests, sum(one.st_size for one in stats.values()), rows)


@lru_cache(maxsize=4096)
def _digest(file: str, size: int, modified: int) -> str:
    """SHA-256 of a file; size and time of change are only here for the cache of one process."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _find_source(module: str) -> Path | None:
    """Find the Python source of a module without importing it or its packages."""
    parts = module.split(".")
    search: list[str] | None = [*sys.path, os.getcwd()]
    spec = None
    for place, part in enumerate(parts):
        # By its last name: a folder without __init__.py would ask for its parent, imported.
        spec = PathFinder.find_spec(part, search)
        if spec is None and place == 0:  # an editable installation may have a finder of its own
            with suppress(ValueError, ImportError):
                spec = importlib.util.find_spec(part)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_installed(file: Path) -> bool:
    in_system = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(in_system) or any(file.is_relative_to(folder) for folder in _INSTALLED)


def _imports(file: Path, *, package: str) -> Iterator[str]:
    """Yield the modules that a source file may import; package: what relative names refer to."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # loading it will report that
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(base if node.level else []), *([node.module] if node.module else [])]
            if module := ".".join(filter(None, parts)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
