"""Run pip with the conditions of requirements decided for another Python.

    python tools/pip_for_python.py 3.12 download --python-version 3.12 ...

pip's `--python-version` chooses wheels, but a requirement such as `six; python_version >= "3.12"`
follows the Python that runs pip (https://github.com/pypa/pip/issues/11010). As in pex, pip's own
function of the environment therefore returns the other version here.
"""

import sys
from collections.abc import Callable


def environment_of(version: str, here: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return this machine's environment for markers, but with CPython `version`, such as 3.12.

    Without a patch level it is 0, as in pip's `--python-version`.
    """
    full = version if version.count(".") == 2 else f"{version}.0"
    return {
        **here(),
        "python_version": ".".join(full.split(".")[:2]),
        "python_full_version": full,
        "implementation_version": full,
    }


def main() -> None:
    """Replace the environment, then run pip's command line."""
    from pip._internal.cli.main import main as run_pip
    from pip._vendor.packaging import markers

    version, here = sys.argv.pop(1), markers.default_environment
    markers.default_environment = lambda: environment_of(version, here)
    sys.exit(run_pip())


if __name__ == "__main__":
    main()
