"""Write the README's file tree: one line per file, from what each file says of itself.

python tools/file_tree.py           rewrite the block between the markers in README.md
python tools/file_tree.py --check   exit with 1 if it is not up to date
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- files: begin -->\n", "<!-- files: end -->"
SHOWN = ("megatron_rl/", "examples/", "tools/", "tests/", "docs/")
WIDTH = 118


def describe(file: Path) -> str:
    """The first sentence of a file's docstring, comment or heading."""
    text = file.read_text()
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    for line in text.splitlines():
        if line.startswith("# ") or (line.startswith("#") and not line.startswith("#!")):
            return line.lstrip("# ").strip()
    return ""


def tree() -> str:
    """Every tracked file under the shown folders, by folder, with its description."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SHOWN],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    files = [Path(name) for name in sorted(set(names)) if (ROOT / name).is_file()]
    files = [f for f in files if f.name != "__init__.py" and f.suffix not in (".svg", ".png")]
    lines, folder = [], None
    for file in sorted(files, key=lambda f: (f.parent.as_posix(), f.name)):
        if file.parent != folder:
            folder = file.parent
            lines.append(f"{folder.as_posix()}/")
        line = f"  {file.name:<26}  {describe(ROOT / file)}".rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0] + " …")
    return "\n".join(lines)


def main() -> int:
    """Rewrite or check the block."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}```text\n{tree()}\n```\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("the README's file tree is out of date: run python tools/file_tree.py")
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
