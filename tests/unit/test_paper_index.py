"""Every file and name that the paper index and the page on public reports point at exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names_in(tree: ast.AST, before: str = "") -> set[str]:
    names = set()
    for node in getattr(tree, "body", []):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names |= {before + node.name} | names_in(node, f"{before}{node.name}.")
    return names


@pytest.mark.parametrize("page", ["paper-index", "public-reports"])
def test_every_place_exists(page):
    text = (ROOT / "research" / "docs" / f"{page}.md").read_text()
    places = re.findall(r"`((?:megatron_rl|tests|tools|examples)/[\w./]+)(?:::([\w.]+))?`", text)
    assert len(places) > 15
    for file, name in places:
        assert (ROOT / file).is_file(), file
        if name:
            assert name in names_in(ast.parse((ROOT / file).read_text())), f"{file}::{name}"
