"""Other releases' Python, installed without what they require into folders of their own.

A folder is kept between runs; a second run needs no registry.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3] / ".cache" / "releases"


class OutOfReachError(Exception):
    """A release is not there and no registry gives it; the message is pip's."""


def installed(package: str, version: str) -> Path:
    """The folder with one release of a package of pip's index, put on a path to import it."""
    folder = ROOT / f"{package}-{version}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    # The oldest Python that each of these releases is made for; their Python code runs under ours.
    options = ("--no-deps", "--only-binary=:all:", "--python-version=3.12",
               "--ignore-requires-python", "--retries=1")  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", partial, *options,
         f"{package}=={version}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise OutOfReachError(run.stderr.strip().splitlines()[-1])
    partial.rename(folder)
    return folder
