"""Write docs/configuration.md, the list of all settings, from megatron_rl/config/.

python tools/configuration_page.py           write it
python tools/configuration_page.py --check   exit with 1 if it is not up to date
"""

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.config import Config, Section  # noqa: E402
from megatron_rl.config.paths import is_path  # noqa: E402
from megatron_rl.config.sections import PATTERNS  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

Every setting of a run, with its default and rule, made from `megatron_rl/config/` by
`python tools/configuration_page.py`. A config is a YAML file; `key=value` arguments override it:

```bash
megatron-rl train my.yaml trainer.steps=20 'eval.sets={aime24: data/aime24.parquet}'
```

In the file a dotted key means what it means on the command line: `model.path: models/mine` is
`model: {path: models/mine}`. `objective: gspo` is short for `objective: {name: gspo}`.

It is strict: a key that is given twice is refused with both lines, and an unknown key or a wrong
value by its name and line, with the nearest valid key, before any work. A key of verl or TRL gets
the name of ours ([Coming from verl, from TRL](coming-from.md)). `--print-config` shows the whole
config of a command.

Paths are relative to the folder that the command is started in. `~`, `$NAME` and `${NAME}` in them
are replaced there, and a variable that is not set is refused; the run directory keeps absolute
paths. Settings that are texts keep what was written: `run.name=off`, `1e3` and `2026-01-01` are no
booleans, numbers or dates. Only `null` is none, and quotes around a text do not belong to it.
"""
SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
NAMES = (
    "name of a reward",
    "a file name of letters, digits, `.`, `_` and `-`",
    "name of a variable",
)
WORDS = {Any: "any value", int: "integer", float: "number", bool: "`true` or `false`", str: "text"}


def page() -> str:
    """The whole page."""
    tables = [_table("", Config)]
    for name, field in Config.model_fields.items():
        if section := _section_of(field):
            tables.append(_table(name, section))
    return HEAD + "".join(tables)


def _table(name: str, section: type[Section]) -> str:
    title = f"\n## {name}\n\n{section.__doc__}\n" if name else ""
    rows = _rows(f"{name}." if name else "", section)
    lines = ["| key | default | rule | |", "|---|---|---|---|", *rows]
    return f"{title}\n" + "\n".join(lines) + "\n"


def _rows(prefix: str, section: type[Section]) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is not None and not prefix:
            continue  # it has a table of its own
        assert field.description, f"{prefix}{name} has no docstring"
        output = " ".join(field.description.split())
        rule = _rule(field.annotation, field.metadata)
        rows.append(f"| `{prefix}{name}` | {_default(field)} | {rule} | {output} |")
        if inner is not None:
            rows += _rows(f"{prefix}{name}.", inner)
    return rows


def _section_of(field: FieldInfo) -> type[Section] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump()
    if value == "":
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()
    return f"`{text}`"


def _rule(kind: Any, rules: list[Any]) -> str:
    """Type and rule of a value."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if isinstance(kind, type) and issubclass(kind, Section):
        return "a mapping"
    if get_origin(kind) in (dict, list):
        kinds = " to ".join(_rule(one, []) for one in arguments)
        return f"a mapping of {kinds}" if get_origin(kind) is dict else f"a list of {kinds}"
    if hasattr(kind, "__metadata__"):  # Annotated
        return _rule(arguments[0], _flat(kind.__metadata__))
    if get_origin(kind) in (Union, UnionType):
        others = [_rule(one, rules) for one in arguments if one is not NoneType]
        return " or ".join(others + ["`null`"] * (NoneType in arguments))
    if is_path(kind, rules):
        return "path"
    rules = _flat(rules)
    for pattern in filter(None, (getattr(rule, "pattern", None) for rule in rules)):
        return NAMES[list(PATTERNS).index(pattern)]
    bounds = [
        f"{sign} {getattr(rule, key)}"
        for rule in rules
        for one, (key, sign) in SIGNS.items()
        if isinstance(rule, one)
    ]
    return " ".join([WORDS[kind], ", ".join(bounds)]).strip()


def _flat(rules: Any) -> list[Any]:
    return [one for rule in rules for one in getattr(rule, "metadata", [rule])]


def main() -> None:
    """Write the page, or with --check compare it."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/configuration.md is not up to date: run tools/configuration_page.py")


if __name__ == "__main__":
    main()
