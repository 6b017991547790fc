"""Count wording that CONTRIBUTING.md asks to avoid in code and tests, and fail above LIMIT.

    python tools/plain_words.py

prints each place, and the counts.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron_rl", "tests", "tools")
OWN_FILES = ("plain_words.py", "test_plain_words.py")  # they contain the phrases
LIMIT = 10
FIRST_WORDS = {"what", "which", "where", "how", "whether", "of"}
PHRASES = re.compile(
    r"\b(says|said|tells|told|hears|heard|speaks|anew|beside|for\s+ever|under\s+way)\b", re.I
)

VERBS = re.compile(
    r"\b(say|says|said|tell|tells|told|hears?|heard|holds?|held|looks?|looked|looking)\b(?!-out)",
    re.I,
)


def docstrings(source: str) -> list[tuple[int, str]]:
    """Line and text of every docstring, attributes' included."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]


def docstring_openings(source: str) -> list[tuple[int, str]]:
    """Line and first word of docstrings that open with FIRST_WORDS."""
    words = [(line, text.split()[:1]) for line, text in docstrings(source)]
    return [(line, word) for line, first in words for word in first if word.lower() in FIRST_WORDS]


def phrases(source: str) -> list[tuple[int, str]]:
    """Line and text of every phrase to avoid, in code, comments and strings."""
    return [(source.count("\n", 0, m.start()) + 1, m[0]) for m in PHRASES.finditer(source)]


def machine_verbs(source: str) -> list[tuple[int, str]]:
    """Line and text of VERBS in docstrings and comments, where programs are the usual subjects."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        (token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT
    ]
    texts = docstrings(source) + comments
    return [(line, match[0]) for line, text in texts for match in VERBS.finditer(text)]


def count(folder: Path) -> tuple[int, int, int]:
    """Docstring openings, phrases and machine verbs in all files under a folder."""
    sources = [file.read_text(encoding="utf-8") for file in folder.rglob("*.py")]
    openings, found, verbs = (
        sum(len(read(source)) for source in sources)
        for read in (docstring_openings, phrases, machine_verbs)
    )
    return openings, found, verbs


def main() -> None:
    total = 0
    for file in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        if file.name in OWN_FILES:
            continue
        source = file.read_text(encoding="utf-8")
        for line, words in sorted(docstring_openings(source) + phrases(source)):
            print(f"{file.relative_to(ROOT)}:{line}: {' '.join(words.split())}")
            total += 1
    print(f"{total} docstring openings and phrases to avoid; at most {LIMIT}")
    sys.exit(total > LIMIT)


if __name__ == "__main__":
    main()
