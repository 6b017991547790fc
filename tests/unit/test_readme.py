"""The README's file tree names every file that is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_file_tree_is_up_to_date():
    command = [sys.executable, "tools/file_tree.py", "--check"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr
