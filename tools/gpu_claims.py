"""Compare docs/gpu-claims.md with the sentences of README.md and docs/ that only a GPU can show.

    python tools/gpu_claims.py            # print rows that the page lacks or has too many
    python tools/gpu_claims.py --write    # write the counts into README.md

A sentence, item of a list or row of a table is a claim if it has one of DEVICE_WORDS, and one of
CLAIM_WORDS or a quantity. docs/measurements/ is skipped (its pages carry machine and date), and so
are SKIPPED; a row may name a sentence there. A row of the page starts with the page and the first
words of its sentence.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "docs" / "gpu-claims.md"
SKIPPED = {"docs/gpu-claims.md", "docs/configuration.md"}
MEASUREMENTS = "docs/measurements/"
DEVICE_WORDS = re.compile(
    r"\b(GPUs?|CUDA|NCCL|InfiniBand|H100|H200|B200|Transformer\s+Engine|[Ff][Pp]8"
    r"|compute capability|(on|for) (a|the) device)\b"
)
CLAIM_WORDS = re.compile(
    r"\b(runs?|ran|works?|passed|faster|slower|untested|measured|tested|exact(ly)?|equals?"
    r"|shown|same|waits?|matters?|finds|choice)\b",
    re.I,
)
QUANTITY = re.compile(
    r"(?<![\w.:/-])\d[\d,.]*\s*(%|GB|GiB|MiB|ms\b|s\b|us\b|tokens|TFLOP|seconds|minutes)"
)
WORDS = 10  # of a sentence, which name it
STATES = ("seen", "CPU test", "not shown", "no claim")
BLOCK = re.compile(r"(?<=<!-- made by tools/gpu_claims.py -->\n).*?(?=\n<!-- end -->)", re.S)


@dataclass(frozen=True)
class Claim:
    """A row of the page: where the sentence is, its first words, its state and the evidence."""

    page: str
    words: str
    state: str = "not shown"
    evidence: str = ""

    def row(self) -> str:
        """The row in Markdown."""
        return f"| {self.page} | {self.words} | {self.state} | {self.evidence} |"


def first_words(sentence: str) -> str:
    """The words that name a sentence, without markup."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return " ".join(re.sub(r"[`*|\\]|^- ", " ", plain).split()[:WORDS])


def sentences(text: str) -> Iterator[str]:
    """Sentences, rows of tables and items of lists outside of code, each on one line."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\||\d+\. ))", text):
        line = " ".join(block.split())
        if line.startswith("|"):
            yield line
        elif not line.startswith("#"):
            yield from re.split(r"(?<=[.:!?)]) (?=[A-Z`\[*])", line)


def pages(root: Path) -> dict[str, str]:
    """Text by name of every page whose sentences are checked."""
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    names = {str(file.relative_to(root)): file for file in files}
    return {name: file.read_text() for name, file in names.items() if name not in SKIPPED}


def claims_in(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Page and first words of each sentence that only a GPU can show."""
    return [
        (page, first_words(one))
        for page, text in texts.items()
        if not page.startswith(MEASUREMENTS)
        for one in sentences(re.sub(BLOCK, "", text))
        if DEVICE_WORDS.search(one) and (CLAIM_WORDS.search(one) or QUANTITY.search(one))
    ]


def read_ledger(text: str) -> list[Claim]:
    """Rows of the page."""
    cells = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in text.splitlines()
    ]
    return [Claim(*row) for row in cells if len(row) == 4 and row[2] in STATES]


def compare(texts: dict[str, str], ledger: list[Claim]) -> list[str]:
    """Differences between the pages and the ledger, one line each."""
    found, listed = Counter(claims_in(texts)), Counter((one.page, one.words) for one in ledger)
    missing = [f"missing: {Claim(*one).row()}" for one in found - listed]
    surplus = [
        f"no such sentence: {Claim(page, words).row()}"
        for page, words in listed - found
        if words not in map(first_words, sentences(texts.get(page, "")))
    ]
    return missing + surplus


def status(ledger: list[Claim]) -> str:
    """The paragraph of README.md that counts the claims."""
    counts = Counter(one.state for one in ledger)
    total = sum(counts.values()) - counts["no claim"]
    return (
        f"- **Statements that need a GPU**: {total}. {counts['seen']} were seen on a "
        f"GPU, {counts['CPU test']} are tested on CPU only, {counts['not shown']} are not shown\n"
        "  ([all of them](docs/gpu-claims.md))."
    )


def main() -> None:
    """Print the differences; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="Write the counts into README.md.")
    arguments = parser.parse_args()
    ledger = read_ledger(LEDGER.read_text())
    if arguments.write:
        readme = ROOT / "README.md"
        readme.write_text(BLOCK.sub(lambda _: status(ledger), readme.read_text()))
    wrong = compare(pages(ROOT), ledger)
    print("\n".join([*wrong, status(ledger)]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
