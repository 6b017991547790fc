"""Write the pages of settings and metrics, docs/configuration.md and the lists of docs/metrics.md.

They come from megatron_rl/config/ and megatron_rl/telemetry/metric_table.py.

python tools/reference_pages.py           write them
python tools/reference_pages.py --check   exit with 1 if they are not up to date
"""

import re
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
from megatron_rl.config.combinations import FEATURES  # noqa: E402
from megatron_rl.config.sections import (  # noqa: E402
    PATTERNS,
    is_path,
)
from megatron_rl.telemetry.metric_table import TABLES, Metric  # noqa: E402

CONFIGURATION = ROOT / "docs" / "configuration.md"
METRICS = ROOT / "docs" / "metrics.md"
HEAD = """# Configuration

Every setting of a run, with its default and rule, made from `megatron_rl/config/` by
`python tools/reference_pages.py`; a number without a point is an integer. A config is a YAML file;
`key=value` arguments override it:

```bash
megatron-rl train my.yaml trainer.steps=20 'eval.sets={aime24: data/aime24.parquet}'
```

In the file, `model.path: models/mine` is `model: {path: models/mine}`, and `objective: gspo` is
`objective: {name: gspo}`. A repeated or unknown key or a wrong value is refused by name and line
before any work ([keys of verl and TRL](coming-from.md)). `--print-config` shows the whole config.

Paths are relative to the folder where the command is started. `~`, `$NAME` and `${NAME}` in them
are replaced; a variable that is not set is refused. Text settings keep what was written:
`run.name=off` and `1e3` are no booleans or numbers.
"""
COMBINATIONS = """
## What combines with what

A config with two features that exclude each other is refused; single settings and
[models](models.md) have further limits.

| feature | refuses (why) |
|---|---|
"""
SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
NAMES = (
    "name of a reward",
    "file name",
    "name of a variable",
)
WORDS = {Any: "any value", int: "integer", float: "number", bool: "`true` or `false`", str: "text"}


def configuration_page() -> str:
    """The whole page of settings."""
    tables = [_table("", Config)]
    for name, field in Config.model_fields.items():
        if section := _section_of(field):
            tables.append(_table(name, section))
    return HEAD + "".join(tables) + _combinations()


def _combinations() -> str:
    """The table of features and of those that each refuses, with the reason."""
    rows = []
    for name, feature in FEATURES.items():
        by_reason: dict[str, list[str]] = {}
        for other, reason in feature.refuses.items():
            by_reason.setdefault(reason, []).append(other)
        refused = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
        if refused:
            rows.append(f"| {name} (`{feature.key}`) | {refused} |")
    return COMBINATIONS + "\n".join(rows) + "\n"


def _table(name: str, section: type[Section]) -> str:
    title = f"\n## {name}\n\n{' '.join((section.__doc__ or '').split())}\n" if name else ""
    rows = _rows(f"{name}." if name else "", section)
    return f"{title}\n" + "\n".join(rows) + "\n"


def _rows(prefix: str, section: type[Section]) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is not None and not prefix:
            continue  # it has a part of its own
        assert field.description, f"{prefix}{name} has no docstring"
        text = " ".join(field.description.split())
        rows.append(f"- `{prefix}{name}{_default(field)}: {text}")
        is_named = get_origin(field.annotation) is dict  # its text lists what each has
        has_a_part = inner in map(_section_of, Config.model_fields.values())
        if inner is not None and not is_named and not has_a_part:
            rows += _rows(f"{prefix}{name}.", inner)
    return rows


def _section_of(field: FieldInfo) -> type[Section] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _default(field: FieldInfo) -> str:
    """Default, end of the code font, and rule, without what default and description show."""
    rule = _rule(field.annotation, field.metadata)
    if field.is_required():
        return f"` ({rule})"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "`"
    text = yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()
    output = "`" if value == "" else f"={text}`"
    if value is None:
        return f"{output} ({rule.removesuffix(' or `null`')})"
    rule = re.sub(r"^(integer|number)(?: (?=[≥>])|$)", "", rule)
    if rule in ("text", WORDS[bool]) or _names_all(field.description or "", field.annotation):
        return output
    return f"{output} ({rule})" if rule else output


def _names_all(text: str, kind: Any) -> bool:
    """Return True if a description names every choice of a setting."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return bool(choices) and all(f"`{choice}`" in text for choice in choices)


def _rule(kind: Any, rules: list[Any]) -> str:
    """Type and rule of a value."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if isinstance(kind, type) and issubclass(kind, Section):
        return "mapping"
    if get_origin(kind) in (dict, list):
        return "mapping" if get_origin(kind) is dict else f"list of {_rule(arguments[0], [])}"
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
        f"{sign}{getattr(rule, key):.15g}"
        for rule in rules
        for one, (key, sign) in SIGNS.items()
        if isinstance(rule, one)
    ]
    return " ".join([WORDS[kind], ", ".join(bounds)]).strip()


def _flat(rules: Any) -> list[Any]:
    return [one for rule in rules for one in getattr(rule, "metadata", [rule])]


def metrics_page() -> str:
    """The page of metrics with its lists made from code."""
    made = iter(_metric_list(rows) for rows in TABLES)
    return re.sub(r"(?m)^- `.*\n(?:- `.*\n)+", lambda _: next(made), _read(METRICS))


def _metric_list(rows: tuple[Metric, ...]) -> str:
    """One list: names, description, unit, and what the metrics cover."""
    lines = []
    for row in rows:
        unit = f" ({row.unit})" * (row.unit not in ("", "0..1"))
        covers = f"; *{row.covers}*" * bool(row.covers)
        names = ", ".join(f"`{name}`" for name in row.names)
        lines.append(f"- {names}: {row.description}{unit}{covers}\n")
    return "".join(lines)


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def main() -> None:
    """Write the pages, or with --check compare them."""
    for page, text in ((CONFIGURATION, configuration_page()), (METRICS, metrics_page())):
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
        elif _read(page) != text:
            sys.exit(f"{page} is not up to date: run python tools/reference_pages.py")


if __name__ == "__main__":
    main()
