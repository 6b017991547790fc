"""Record the settings in the released configs of verl and TRL, for the tests of our tables.

    pip download --no-deps -d FOLDER verl==0.9.1 trl==1.16.0
    python tools/other_trainers_keys.py FOLDER

Writes key names with their defaults as JSON, one in a line, into `tests/unit/other_trainers/`.
TRL's configs inherit from the `TrainingArguments` of the installed transformers.
"""

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "tests" / "unit" / "other_trainers"
VERL = (
    *(f"_generated_ppo_{kind}trainer.yaml" for kind in ("", "megatron_", "veomni_", "torchtitan_")),
    "sft_trainer_engine.yaml",
)
TRL = (  # of a key in several classes, the default of the last
    ("trl/trainer/base_config.py", "_BaseConfig"), ("trl/trainer/sft_config.py", "SFTConfig"),
    ("trl/trainer/model_config.py", "ModelConfig"), ("trl/scripts/utils.py", "ScriptArguments"),
    ("trl/scripts/grpo.py", "GRPOScriptArguments"), ("trl/trainer/grpo_config.py", "GRPOConfig"),
)  # fmt: skip


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys of nested settings with values; `_target_`, `defaults` are Hydra's own."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if name not in ("_target_", "defaults"):
                yield from leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def fields(source: str, name: str) -> dict[str, Any]:
    """Return the annotated fields of a class in the text of a module, with literal defaults.

    A default that is no literal is None.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = (one for one in node.body if isinstance(one, ast.AnnAssign))
            return {
                one.target.id: _default(one) for one in found if isinstance(one.target, ast.Name)
            }
    raise ValueError(f"no class {name}")


def _default(field: ast.AnnAssign) -> Any:
    value: ast.expr | None = field.value
    if isinstance(value, ast.Call):
        value = next((one.value for one in value.keywords if one.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def main(folder: Path) -> None:
    """Write the key names of the wheels in a folder, with defaults."""
    from transformers import training_args

    (verl,), (trl,) = folder.glob("verl-*.whl"), folder.glob("trl-*.whl")
    with zipfile.ZipFile(verl) as wheel:
        texts = [wheel.read(f"verl/trainer/config/{name}") for name in VERL]
    theirs: dict[str, Any] = {}
    for text in texts:  # of a key in several files, the default of the first
        theirs = dict(leaves(yaml.safe_load(text))) | theirs
    arguments = fields(inspect.getsource(training_args), "TrainingArguments")
    with zipfile.ZipFile(trl) as wheel:
        for module, name in TRL:
            arguments |= fields(wheel.read(module).decode(), name)
    TARGET.mkdir(exist_ok=True)
    for wheel_file, keys in ((verl, theirs), (trl, arguments)):
        name = "-".join(wheel_file.name.split("-")[:2])
        lines = (f"{key} {json.dumps(keys[key])}\n" for key in sorted(keys))
        (TARGET / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
