"""Training from Python, for instance in a notebook: `megatron_rl.train`.

Training runs `megatron-rl train` in a child process, because vLLM and Megatron release their
memory and process groups only when their process exits, and a notebook cell may run several times.
"""

import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from megatron_rl.config import Config, dump_config, load_config
from megatron_rl.runtime.interruption import INTERRUPTED

# The module from which reward workers import a function defined in a notebook.
_MODULE = "reward_from_python"
# Its first line lets a resumed run notice another function, as with a module of the user.
_SOURCE = """# {digest}
import pathlib

import cloudpickle

score = cloudpickle.loads((pathlib.Path(__file__).parent / "score.pickle").read_bytes())
"""
# The child receives SIGTERM when its parent, the notebook kernel, exits.
_PROGRAM = """import signal
from megatron_rl.runtime.interruption import end_with_parent
end_with_parent({parent}, signal.SIGTERM)
from megatron_rl.cli import main
main()
"""
_LAST_LINES = 20


def run_command(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Run `megatron-rl train` in a child process; see `megatron_rl.train`."""
    if not (reward is None or callable(reward)):
        raise TypeError(
            f"reward must be a function, got {reward!r}; to name a verifier, set reward.verifier"
        )
    with tempfile.TemporaryDirectory(prefix="megatron_rl-") as temporary:
        folder = Path(temporary)
        file = _write_config(config, folder)
        all_overrides = [*overrides]
        if reward is not None:
            all_overrides.append(f"reward.verifier={_name_reward(reward, folder)}")
        parsed = load_config(file, all_overrides)
        if (name := parsed.run.name) is None:
            name = f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            all_overrides.append(f"run.name={name}")
        _run(["train", "--config", str(file), *all_overrides], folder)
    return Path(parsed.run.dir).absolute() / name


def _write_config(config: Mapping[str, Any] | str | Path | Config, folder: Path) -> Path:
    if isinstance(config, str | Path):
        return Path(config)
    import yaml

    file = folder / "python.yaml"
    if isinstance(config, Config):
        file.write_text(dump_config(config), encoding="utf-8")
    else:  # `default=str` writes pathlib paths as strings
        file.write_text(
            yaml.safe_dump(json.loads(json.dumps(dict(config), default=str))), encoding="utf-8"
        )
    return file


def _name_reward(reward: Callable[..., Any], folder: Path) -> str:
    """Return `module:name` of the function, pickling it into `folder` if it has no module file."""
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", "")
    source = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and source and getattr(sys.modules[module], name, None) is reward:
        return f"{module}:{name}"
    import cloudpickle

    (folder / "score.pickle").write_bytes(cloudpickle.dumps(reward))
    digest = hashlib.sha256(_describe(reward).encode()).hexdigest()
    (folder / f"{_MODULE}.py").write_text(_SOURCE.format(digest=digest), encoding="utf-8")
    return f"{_MODULE}:score"


def _describe(function: Any) -> str:
    """Return what decides a function's results: its source, and plain values that it refers to."""
    try:
        source, closure = inspect.getsource(function), inspect.getclosurevars(function)
    except (OSError, TypeError):  # defined without a source, or an object
        return ""
    parts = [source]
    for name, value in sorted({**closure.globals, **closure.nonlocals}.items()):
        if isinstance(value, FunctionType) and value.__module__ == "__main__":
            parts.append(inspect.getsource(value))
        elif isinstance(value, bool | int | float | str | tuple | list | dict):
            parts.append(f"{name} = {value!r}")
    return "\n".join(parts)


def _run(arguments: list[str], folder: Path) -> None:
    """Run the command and print its output; raises RuntimeError if it fails."""
    paths = [str(folder), *(path for path in sys.path if path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(parent=os.getpid()), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches this process only, which forwards it once
    )
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    assert process.stdout is not None
    try:
        _print_lines(process.stdout, lines)
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        _print_lines(process.stdout, lines)
        process.wait()
        raise
    finally:
        process.stdout.close()
        if process.poll() is None:  # interrupted a second time: stop immediately
            process.kill()
            process.wait()
    if status == INTERRUPTED:
        raise RuntimeError("the run was interrupted; train again with run.resume=auto")
    if status != 0:
        raise RuntimeError(f"the run failed with exit status {status}:\n{''.join(lines)}")


def _print_lines(output: IO[str], lines: deque[str]) -> None:
    for line in output:
        lines.append(line)
        print(line, end="", flush=True)
