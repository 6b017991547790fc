"""Count wording that CONTRIBUTING.md asks to avoid in code and tests, and fail above LIMIT.

    python tools/plain_words.py

prints each place, and the counts.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron_rl", "tests", "tools")
OWN_FILES = ("plain_words.py", "test_plain_words.py")  # they contain the phrases
LIMIT = 10
FIRST_WORDS = {"what", "which", "where", "how", "whether", "of"}
PHRASES = re.compile(
    r"\b(says|said|tells|told|hears|heard|speaks|anew|beside|for\s+ever|under\s+way)\b", re.I
)


def docstring_openings(source: str) -> list[tuple[int, str]]:
    """Line and first word of docstrings, attributes' included, that open with FIRST_WORDS."""
    texts = [
        (node.lineno, node.value.value.split())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]
    return [(line, words[0]) for line, words in texts if words and words[0].lower() in FIRST_WORDS]


def phrases(source: str) -> list[tuple[int, str]]:
    """Line and text of every phrase to avoid, in code, comments and strings."""
    return [(source.count("\n", 0, m.start()) + 1, m[0]) for m in PHRASES.finditer(source)]


def count(folder: Path) -> tuple[int, int]:
    """Docstring openings and phrases in all files under a folder."""
    sources = [file.read_text() for file in folder.rglob("*.py")]
    return sum(len(docstring_openings(s)) for s in sources), sum(len(phrases(s)) for s in sources)


def main() -> None:
    total = 0
    for file in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        if file.name in OWN_FILES:
            continue
        source = file.read_text()
        for line, words in sorted(docstring_openings(source) + phrases(source)):
            print(f"{file.relative_to(ROOT)}:{line}: {' '.join(words.split())}")
            total += 1
    print(f"{total} docstring openings and phrases to avoid; at most {LIMIT}")
    sys.exit(total > LIMIT)


if __name__ == "__main__":
    main()
