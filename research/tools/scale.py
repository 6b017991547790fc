"""Print what 1,024 ranks cost, row by row: counted, simulated or measured, before and now.

    python -m research.tools.scale                  every module of research/tools/scale_rows
    python -m research.tools.scale push planning    these
    python -m research.tools.scale push --write     also replace their sections of the page

No GPU is needed. A row appears as soon as it is computed. The page is research/docs/scale.md;
a module without a section there gets one at its end.
"""

import argparse
import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from research.tools import scale_rows
from research.tools.scale_rows import HEAD

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
NAMES = sorted(
    module.name for module in pkgutil.iter_modules(scale_rows.__path__) if module.name[0] != "_"
)


def module_named(name: str) -> ModuleType:
    """Import one module of rows."""
    return importlib.import_module(f"research.tools.scale_rows.{name}")


def section(module: ModuleType) -> Iterator[str]:
    """Yield the lines of a module's section: heading, text, then the rows."""
    yield f"## {module.TITLE}\n\n{module.TEXT.strip()}\n\n{HEAD}"
    for row in module.rows():
        yield row.to_line()


def replace_section(page: str, name: str, text: str) -> str:
    """Return the page with `text` as the section of module `name`, at the end if it is new."""
    first, last = f"<!-- rows: {name} -->\n", f"<!-- end: {name} -->\n"
    block = f"{first}{text}\n{last}"
    if first not in page:
        return f"{page.rstrip()}\n\n{block}"
    return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: block, page, flags=re.DOTALL)


def main() -> None:
    """Parse the command line and print the sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help=f"Subjects, by default all of: {', '.join(NAMES)}."
    )
    parser.add_argument(
        "--write", action="store_true", help="Replace these subjects' sections of the page."
    )
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"there is no subject {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        start, lines = time.monotonic(), []
        for line in section(module_named(name)):
            print(line, flush=True)
            lines.append(line)
        print(f"\n({name}: {time.monotonic() - start:.0f} s)\n", flush=True)
        if arguments.write:
            PAGE.write_text(
                replace_section(PAGE.read_text(encoding="utf-8"), name, "\n".join(lines)),
                encoding="utf-8",
            )


if __name__ == "__main__":
    main()
