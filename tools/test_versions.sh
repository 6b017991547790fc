#!/usr/bin/env bash
# Run the actor's tests with another Python and megatron-core, in a separate environment.
#
#   bash tools/test_versions.sh python3.12                          all of the actor's tests
#   bash tools/test_versions.sh python3.12 0.17 tests/unit/actor    some of them, another release
#
# torch and megatron-core are those of megatron_rl/runtime/versions.py for this Python and a CPU, unless named.
# The environment is in .cache/versions (or MEGATRON_RL_VERSIONS) and is kept. Without a CPU build
# of torch on pip's index it takes 5 GB; MEGATRON_RL_TORCH selects another torch ("torch==2.13.0").
# Not part of CI. vLLM is not needed: these tests generate nothing.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -ge 1 ]] || { echo "usage: bash tools/test_versions.sh PYTHON [MEGATRON_CORE] [pytest arguments]" >&2; exit 2; }
python=$1
shift
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    { echo "test_versions: $python does not run; name a Python of 3.11 or later" >&2; exit 2; }
# TORCH, MEGATRON_CORE and others
assignments=$(cd "$ROOT" && "$python" -m megatron_rl.runtime.versions cpu "$version") || exit 1
eval "$assignments"
if [[ ${1:-} =~ ^[0-9]+\.[0-9.]+$ ]]; then
    MEGATRON_CORE="megatron-core==$1.*"
    shift
fi
venv=${MEGATRON_RL_VERSIONS:-$ROOT/.cache/versions}/python$version-${MEGATRON_CORE//[^0-9a-z.-]/_}
cd "$ROOT"

# The package's requirements and pytest; torch and megatron-core are chosen here.
requirements() {
    "$python" - <<'PYTHON'
import ast

for node in ast.parse(open("setup.py").read()).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "REQUIREMENTS":
        names = ast.literal_eval(node.value)
        print("\n".join(name for name in names if not name.startswith(("torch", "megatron-core"))))
print("pytest>=8")
PYTHON
}

if [[ ! -f $venv/ready ]]; then
    echo "test_versions: Python $version, $MEGATRON_CORE; into $venv"
    "$python" -m venv "$venv"
    mapfile -t wanted < <(requirements)
    "$venv/bin/python" -m pip install --quiet --progress-bar off \
        "${MEGATRON_RL_TORCH:-$TORCH}" "$MEGATRON_CORE" "${wanted[@]}" 2>"$venv/setup.log" ||
        { tail -n 5 "$venv/setup.log" >&2; exit 1; }
    touch "$venv/ready"
fi

[[ $# -gt 0 ]] || set -- tests/unit/actor tests/functional/test_actor_*.py tests/functional/test_export.py
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$ROOT
"$venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

names = ("torch", "megatron-core", "transformers")
print("test_versions: Python", sys.version.split()[0], *(f"{n} {version(n)}" for n in names), flush=True)
PYTHON
exec "$venv/bin/python" -m pytest -p no:cacheprovider "$@"
