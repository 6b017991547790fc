#!/usr/bin/env bash
# Create the virtual environment of this project: torch, vLLM and Megatron-core for this machine,
# the package itself in editable mode, and the tools of its tests.
#
#   bash tools/setup_env.sh            into .venv, or the folder in MEGATRON_RL_VENV
#   MEGATRON_RL_BUNDLE=FOLDER bash tools/setup_env.sh
#                                      without network, from a folder of tools/offline_bundle.sh
#   bash tools/setup_env.sh --launcher NeMo-Run alone, for `megatron-rl launch`: into .venv-launcher, or
#                                      the folder in MEGATRON_RL_LAUNCHER_VENV; no compiler needed
#
# Needs Python 3.11 or later and a C++ compiler. A machine with an NVIDIA GPU (nvidia-smi answers)
# gets the CUDA builds, any other the CPU builds. A second run takes a second if nothing has changed;
# it starts over if the inputs of the environment have changed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    "") VENV=${MEGATRON_RL_VENV:-$ROOT/.venv} ;;
    --launcher) VENV=${MEGATRON_RL_LAUNCHER_VENV:-$ROOT/.venv-launcher} ;;
    *) echo "usage: bash tools/setup_env.sh [--launcher]" >&2; exit 2 ;;
esac
BUNDLE=${MEGATRON_RL_BUNDLE:-}
LOG=$VENV/setup.log
STAMP=$VENV/megatron_rl.stamp
CPU_INDEX=https://download.pytorch.org/whl/cpu

# Newer leptonai lacks modules that this NeMo-Run imports; with vLLM it conflicts on starlette.
NEMO_RUN=("nemo-run==0.11.1" "leptonai<0.47")

say() { echo "setup: $*"; }
fail() { echo "setup: ERROR: $*" >&2; exit 1; }

# The first Python of at least 3.11 that runs (a pyenv shim may exist and not run).
find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# step NAME COMMAND...: run quietly, print name and duration; on failure show the end of the log.
step() {
    local name=$1 start=$SECONDS
    shift
    printf 'setup: %s ...' "$name"
    if ! "$@" >>"$LOG" 2>&1; then
        echo " failed after $((SECONDS - start)) s"
        grep -E '^(ERROR|error)' "$LOG" | tail -n 5 >&2 || tail -n 15 "$LOG" >&2
        fail "$name failed; the full output is in $LOG"
    fi
    echo " $((SECONDS - start)) s"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install --quiet --progress-bar off "$@"; }

# Make pip use the wheels of the bundle and no index.
use_bundle() {
    [[ -d $BUNDLE/wheels ]] || fail "MEGATRON_RL_BUNDLE=$BUNDLE has no folder wheels;" \
        "name a folder that tools/offline_bundle.sh made"
    [[ -z $(find "$BUNDLE" -name '*.part000' -print -quit) ]] ||
        fail "$BUNDLE has split files; join them first: bash $BUNDLE/join.sh"
    PIP_FIND_LINKS=$(cd "$BUNDLE/wheels" && pwd)
    export PIP_NO_INDEX=1 PIP_FIND_LINKS
    say "wheels come from $PIP_FIND_LINKS alone"
}

# Check that an address responds within ten seconds.
can_reach() {
    "$VENV/bin/python" - "$1" >/dev/null 2>&1 <<'PYTHON'
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=10)
PYTHON
}

install_torch_cpu() {
    local TORCH_CPU=${TORCH#torch==}
    # pip's own index, or a mirror or folder that pip is configured with, may have the CPU build.
    # By default it has only the CUDA build, of several gigabytes.
    local version="$TORCH_CPU+cpu" versions
    if [[ -n $BUNDLE ]]; then
        step "torch $version from the bundle" install "torch==$version"
        return
    fi
    versions=$(pip --timeout 10 --retries 0 index versions torch 2>>"$LOG" || true)
    if grep -qF "$version" <<<"$versions"; then
        step "torch $version from pip's own index" install "torch==$version"
    elif can_reach "$CPU_INDEX/torch/"; then
        [[ -n $versions ]] || fail "pip's index cannot be reached, so nothing but torch could be" \
            "installed; check the network, the proxy, or pip's settings (pip config list)"
        step "torch $version from $CPU_INDEX" \
            install "torch==$version" --extra-index-url "$CPU_INDEX"
    elif [[ -n $versions ]]; then
        fail "pip's index has no CPU build of torch $TORCH_CPU, and $CPU_INDEX cannot be reached;" \
            "allow that address, or give pip a folder that holds the wheel (PIP_FIND_LINKS)"
    else
        fail "neither pip's index nor $CPU_INDEX can be reached; check the network, the proxy," \
            "or pip's settings (pip config list)"
    fi
}

install_engines_cpu() {
    install_torch_cpu
    step "$VLLM for CPU" install "$VLLM" "$TORCH+cpu"
    # vLLM's dependencies install CUDA builds of these, which transformers fails to import.
    step "removing CUDA builds of torchvision, torchaudio, torchcodec" \
        pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

install_engines_cuda() {
    [[ -n $BUNDLE ]] || pip --timeout 10 --retries 0 index versions vllm >>"$LOG" 2>&1 ||
        fail "pip's index cannot be reached; check the network, the proxy, or pip's settings"
    step "vLLM for CUDA, with the torch it is built for" install "$VLLM" "$TORCH"
}

# The requirements of setup.py, one per line; $1: the name of its list.
requirements() {
    "$VENV/bin/python" - "$ROOT/setup.py" "$1" <<'PYTHON'
import ast
import sys

tree = ast.parse(open(sys.argv[1]).read())
for node in tree.body:
    if isinstance(node, ast.Assign) and node.targets[0].id == sys.argv[2]:
        print("\n".join(ast.literal_eval(node.value)))
PYTHON
}

install_package() {
    local wanted
    # torch and Megatron-core are already installed, in the versions chosen above.
    mapfile -t wanted < <({ requirements REQUIREMENTS; requirements DEVELOPMENT; } |
        grep -vE '^(torch|megatron-core)\b')
    step "the other requirements and the test tools" install "${wanted[@]}" "setuptools>=68" wheel
    step "megatron_rl, editable" install --no-deps --no-build-isolation --editable "$ROOT"
}

# Optional packages: without them their tests are skipped. Installed packages are not changed.
install_optional() {
    local start=$SECONDS wanted
    mapfile -t wanted < <(requirements DATA; requirements REASONING_GYM)
    printf 'setup: %s ...' "${wanted[*]}"
    pip freeze --exclude-editable >"$VENV/installed.txt"
    if install --constraint "$VENV/installed.txt" "${wanted[@]}" >>"$LOG" 2>&1; then
        echo " $((SECONDS - start)) s"
    else
        echo " not available here; see setup.log. Everything else works"
    fi
}

install_launcher() {
    step "${NEMO_RUN[0]}" install "${NEMO_RUN[@]}" "pyarrow>=15" "pydantic>=2.7" pyyaml "scipy>=1.14" \
        "setuptools>=68" wheel
    step "megatron_rl, editable, without its requirements" \
        install --no-deps --no-build-isolation --editable "$ROOT"
    step "a look at whether it all loads" "$VENV/bin/python" -c \
        "import nemo_run, megatron_rl.apps.launch.nemo"
}

install_training() {
    local version=$1 kind=$2 assignments
    # TORCH, VLLM, MEGATRON_CORE, INSTALL_TRANSFORMER_ENGINE: releases that belong together.
    assignments=$(cd "$ROOT" && "$VENV/bin/python" -m megatron_rl.runtime.versions "$kind" "$version") || exit 1
    eval "$assignments"
    "install_engines_$kind"
    step "$MEGATRON_CORE" install "$MEGATRON_CORE"
    install_package
    install_optional
    step "a look at whether it all loads" "$VENV/bin/python" -c \
        "import torch, transformers, vllm, megatron.core, megatron_rl"
    [[ $kind == cpu ]] || say "optional, compiled for half an hour: $VENV/bin/$INSTALL_TRANSFORMER_ENGINE"
}

main() {
    local start=$SECONDS python kind version fingerprint
    if [[ ${1:-} == --launcher ]]; then kind=launcher; elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then kind=cuda; else kind=cpu; fi
    fingerprint=$(cat "${BASH_SOURCE[0]}" "$ROOT/setup.py" "$ROOT/megatron_rl/runtime/versions.py" <(echo "$kind $ROOT $VENV") |
        sha256sum | cut -d' ' -f1)
    if [[ -x $VENV/bin/python && $(cat "$STAMP" 2>/dev/null) == "$fingerprint" ]]; then
        say "$VENV is ready"
        return
    fi

    python=$(find_python) || fail "Python 3.11, 3.12 or 3.13 is needed and none was found" \
        "(python3 is $(python3 --version 2>/dev/null || echo missing)); install one, for example" \
        "apt-get install python3.11 python3.11-venv"
    [[ $kind == launcher ]] || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
        command -v c++ >/dev/null 2>&1 ||
        fail "a C++ compiler is needed and none was found; for example apt-get install g++"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "Python $version, $kind; into $VENV, with details in setup.log there"
    if [[ ! -x $VENV/bin/python ]]; then
        "$python" -m venv "$VENV" >/dev/null 2>&1 || fail "$python cannot make the virtual" \
            "environment $VENV; on Debian and Ubuntu: apt-get install python$version-venv," \
            "and see that the folder can be written"
    fi
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    rm -f "$STAMP"
    : >"$LOG"
    [[ -z $BUNDLE ]] || use_bundle

    if [[ $kind == launcher ]]; then install_launcher; else install_training "$version" "$kind"; fi
    echo "$fingerprint" >"$STAMP"
    say "done in $((SECONDS - start)) s"
}

main "$@"
