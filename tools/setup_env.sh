#!/usr/bin/env bash
# Create the virtual environment of this project: torch, vLLM and Megatron-core for this machine,
# the package itself in editable mode, and the tools of its tests.
#
#   bash tools/setup_env.sh            into .venv, or the folder in MEGATRON_RL_VENV
#   MEGATRON_RL_BUNDLE=FOLDER bash tools/setup_env.sh
#                                      without network, from a folder of tools/offline_bundle.sh
#   bash tools/setup_env.sh --launcher NeMo-Run alone, for `megatron-rl launch`: into .venv-launcher, or
#                                      the folder in MEGATRON_RL_LAUNCHER_VENV; no compiler needed
#   MEGATRON_RL_UNLOCKED=1 bash tools/setup_env.sh
#                                      the newest supported releases instead of those of requirements/
#
# Needs Python 3.11, 3.12 or 3.13 and an index for pip, such as PyPI. A machine with an NVIDIA GPU
# (nvidia-smi answers) gets the CUDA builds and needs a C++ compiler; any other gets the CPU builds.
# Where no index has the CPU build of torch, its CUDA build does the same work. Releases and hashes
# are those of the lock in requirements/ for this Python, if there is one (tools/lock.py). A second
# run takes a second if nothing has changed; it starts over if the inputs of the environment have
# changed.
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    "") VENV=${MEGATRON_RL_VENV:-$ROOT/.venv} ;;
    --launcher) VENV=${MEGATRON_RL_LAUNCHER_VENV:-$ROOT/.venv-launcher} ;;
    *) echo "usage: bash tools/setup_env.sh [--launcher]" >&2; exit 2 ;;
esac
BUNDLE=${MEGATRON_RL_BUNDLE:-}
LOG=$VENV/setup.log
STAMP=$VENV/megatron_rl.stamp
HINT= # of a failed step
CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH_LOCK=$ROOT/requirements/torch-cuda-for-cpu.txt
TORCH_BUILD=+cpu # empty: the CUDA build, on a machine without a GPU
LEFT_OUT=() # packages that are not installed, though the lock or a list has them

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

# Print the time and the last line of the log every ten seconds, as long as this script runs; $1: start.
show_progress() {
    # A sleep that outlives this function must not keep the script's output open.
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        printf 'setup:   %d s: %.90s\n' $((SECONDS - $1)) \
            "$(tail -n 20 "$LOG" | grep -v '^WARNING' | tail -n 1)"
    done
}

# timed NAME COMMAND...: run into the log, print name, progress and duration; returns the status.
timed() {
    local name=$1 start=$SECONDS progress status=0
    shift
    say "$name ..."
    show_progress "$start" &
    progress=$!
    disown
    # shellcheck disable=SC2064
    trap "kill $progress 2>/dev/null" EXIT
    "$@" >>"$LOG" 2>&1 || status=$?
    kill "$progress" 2>/dev/null || true
    trap - EXIT
    [[ $status != 0 ]] || say "$name: $((SECONDS - start)) s"
    return "$status"
}

# step NAME COMMAND...: as `timed`; on failure show the end of the log and exit.
step() {
    local start=$SECONDS
    if ! timed "$@"; then
        echo "setup: $1: failed after $((SECONDS - start)) s"
        grep -E '^(ERROR|error)' "$LOG" | tail -n 5 >&2 || tail -n 15 "$LOG" >&2
        fail "$1 failed; the full output is in $LOG$HINT"
    fi
}

# -I: packages in PYTHONPATH would count as installed; PIP_USER: refused in a virtual environment.
pip() { PIP_USER=0 "$VENV/bin/python" -I -m pip --disable-pip-version-check "$@"; }
install() { pip install --progress-bar off --no-compile "$@"; } # `compile_all` uses every core

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

# Find an index with the CPU build of torch: sets TORCH_FROM to a description and TORCH_INDEX to pip's
# options for it. Without one TORCH_BUILD is emptied.
find_torch_cpu() {
    local TORCH_CPU=${TORCH#torch==}
    # pip's own index, or a mirror or folder that pip is configured with, may have the CPU build.
    # By default it has only the CUDA build, of several gigabytes.
    local version="$TORCH_CPU+cpu" versions reason
    TORCH_INDEX=()
    if [[ -n $BUNDLE ]]; then
        TORCH_FROM="the bundle"
        return
    fi
    versions=$(pip --timeout 10 --retries 0 index versions torch 2>>"$LOG" || true)
    if grep -qF "$version" <<<"$versions"; then
        TORCH_FROM="pip's own index"
    elif can_reach "$CPU_INDEX/torch/"; then
        [[ -n $versions ]] || fail "pip's index cannot be reached, so nothing but torch could be" \
            "installed; check the network, the proxy, or pip's settings (pip config list)"
        TORCH_FROM=$CPU_INDEX
        TORCH_INDEX=(--extra-index-url "$CPU_INDEX")
    elif [[ -n $versions ]]; then
        reason="pip's index has no CPU build of torch $TORCH_CPU, and $CPU_INDEX cannot be reached"
        grep -qE "[ (]${TORCH_CPU//./\\.}(,|\)|$)" <<<"$versions" || fail "$reason; nor has it another" \
            "build; allow that address, or give pip a folder that holds the wheel (PIP_FIND_LINKS)"
        say "$reason: its CUDA build is installed, which needs no GPU and does the same:" \
            "$(sed -n 's/^# Download: //p' "$TORCH_LOCK") to download, 4 GB on the disk"
        TORCH_FROM="pip's index"
        TORCH_BUILD=
    else
        fail "neither pip's index nor $CPU_INDEX can be reached; check the network, the proxy," \
            "or pip's settings (pip config list)"
    fi
}

# The CUDA build of torch, for a machine without a GPU.
install_torch_cuda() {
    local wanted=(--no-deps --require-hashes -r "$TORCH_LOCK")
    [[ -z ${MEGATRON_RL_UNLOCKED:-} && $(uname -sm) == "Linux x86_64" ]] || wanted=("$TORCH")
    step "the CUDA build of torch, from $TORCH_FROM" install "${wanted[@]}"
}

# What vLLM requires apart from torch, whose CPU build its metadata name.
requirements_of_vllm() {
    (cd "$ROOT" && "$VENV/bin/python" -m megatron_rl.runtime.versions requirements "${VLLM%%[=<>]*}")
}

install_engines_cpu() {
    local wanted
    find_torch_cpu
    if [[ -z $TORCH_BUILD ]]; then
        install_torch_cuda
        step "$VLLM, without a check of what it requires" install --no-deps "$VLLM"
        mapfile -t wanted < <(requirements_of_vllm)
        step "what $VLLM requires" install "$TORCH" "${wanted[@]}"
        return
    fi
    step "$TORCH+cpu from $TORCH_FROM" install "$TORCH+cpu" "${TORCH_INDEX[@]}"
    step "$VLLM for CPU" install "$VLLM" "$TORCH+cpu"
    # vLLM's dependencies install CUDA builds of these, which transformers fails to import.
    step "removing CUDA builds of torchvision, torchaudio, torchcodec" \
        pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

check_index() {
    [[ -n $BUNDLE ]] || pip --timeout 10 --retries 0 index versions pip >>"$LOG" 2>&1 ||
        fail "pip's index cannot be reached; check the network, the proxy, or pip's settings"
}

install_engines_cuda() {
    check_index
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

install_requirements() {
    local wanted
    # torch and Megatron-core are already installed, in the versions chosen above.
    mapfile -t wanted < <({ requirements REQUIREMENTS; requirements DEVELOPMENT; } |
        grep -vE '^(torch|megatron-core)\b')
    step "the other requirements and the test tools" install "${wanted[@]}" "setuptools>=68" wheel
}

# Optional packages: without them their tests are skipped. Installed packages are not changed.
install_optional() {
    local wanted not_these
    not_these="^($(IFS='|' && echo "${LEFT_OUT[*]}"))([^[:alnum:]-]|$)"
    mapfile -t wanted < <({ requirements DATA; requirements REASONING_GYM; requirements GGUF; } |
        grep -vE "$not_these")
    pip freeze --exclude-editable >"$VENV/installed.txt"
    timed "${wanted[*]}" install --constraint "$VENV/installed.txt" "${wanted[@]}" ||
        say "not available here; see setup.log. Everything else works"
}

# Install exactly the releases of $LOCK; $1: kind. Wheels of a bundle may be reduced, which changes
# their hashes: its join.sh has compared its own sums.
install_locked() {
    local releases="the releases of requirements/${LOCK##*/}" from="pip's index" names
    TORCH_INDEX=()
    if [[ $1 == cpu ]]; then find_torch_cpu; from="pip's index, torch from $TORCH_FROM"; else check_index; fi
    HINT="; to take the newest supported releases instead: MEGATRON_RL_UNLOCKED=1 bash tools/setup_env.sh"
    if [[ -z $TORCH_BUILD ]]; then
        install_torch_cuda
        LEFT_OUT+=(torch)
    fi
    names=$(IFS='|' && echo "${LEFT_OUT[*]}")
    awk -v names="^($names)==" '/^[^ #]/ { skip = $0 ~ names } !skip' "$LOCK" >"$VENV/releases.txt"
    if [[ -n $BUNDLE ]]; then
        sed -i -nE 's/^([^ #]+==[^ ]+).*/\1/p' "$VENV/releases.txt"
        step "$releases, from the bundle" install --no-deps --ignore-requires-python -r "$VENV/releases.txt"
    else
        step "$releases, from $from" install --no-deps --ignore-requires-python --require-hashes \
            -r "$VENV/releases.txt" "${TORCH_INDEX[@]}"
    fi
    HINT=
}

# Some packages have templates that are no Python; nothing imports their tests.
compile_all() {
    "$VENV/bin/python" -m compileall -q -j 0 -x 'site-packages/.*/tests/' \
        "$VENV"/lib/python*/site-packages "$ROOT/megatron_rl" || true
}

# Every requirement, in the newest supported release; $1: kind.
install_unlocked() {
    "install_engines_$1"
    # Its metadata exclude Python 3.11, under which it runs; it requires only torch, numpy and packaging.
    step "$MEGATRON_CORE" install --no-deps --ignore-requires-python "$MEGATRON_CORE"
    install_requirements
    install_optional
}

install_launcher() {
    if [[ -n $LOCK ]]; then install_locked launcher; else
        step "NeMo-Run" install -r "$ROOT/requirements/launcher.in"
    fi
    step "megatron_rl, editable, without its requirements" \
        install --no-deps --no-build-isolation --editable "$ROOT"
    step "compiling what was installed" compile_all
    step "a look at whether it all loads" "$VENV/bin/python" -c \
        "import nemo_run, megatron_rl.apps.launch.nemo"
}

install_training() {
    local version=$1 kind=$2 assignments
    # TORCH, VLLM, MEGATRON_CORE, INSTALL_TRANSFORMER_ENGINE: releases that belong together.
    assignments=$(cd "$ROOT" && "$VENV/bin/python" -m megatron_rl.runtime.versions "$kind" "$version") || exit 1
    eval "$assignments"
    if [[ -n $LOCK ]]; then install_locked "$kind"; else install_unlocked "$kind"; fi
    step "megatron_rl, editable" install --no-deps --no-build-isolation --editable "$ROOT"
    step "compiling what was installed" compile_all
    step "a look at whether it all loads" "$VENV/bin/python" -c \
        "import torch, transformers, vllm, megatron.core, megatron_rl"
    [[ $kind == cpu ]] || say "optional, compiled for half an hour: $VENV/bin/$INSTALL_TRANSFORMER_ENGINE"
}

# The folder whose code this environment imports (an editable installation), or nothing.
imported_clone() {
    "$VENV/bin/python" -I - 2>/dev/null <<'PYTHON'
import importlib.metadata
import json
import urllib.parse

record = importlib.metadata.distribution("megatron_rl").read_text("direct_url.json")
print(urllib.parse.unquote(urllib.parse.urlparse(json.loads(record)["url"]).path))
PYTHON
}

# An environment imports the code of one clone; a second one would change what the first one runs.
refuse_other_clone() {
    local other
    other=$(imported_clone || true)
    [[ -z $other || $other -ef $ROOT || ! -f $other/setup.py ]] ||
        fail "$VENV imports the code of another clone, $other; this one is $ROOT. Each clone needs" \
            "an environment of its own: unset MEGATRON_RL_VENV and MEGATRON_RL_LAUNCHER_VENV, or" \
            "name another folder there; or delete $VENV first, if $other no longer needs it"
}

has_compiler() { command -v gcc || command -v clang || command -v cc; } >/dev/null 2>&1

# $1: kind. Of what is installed only reasoning-gym's pycosat has no wheels; a bundle has one.
without_compiler() {
    [[ $1 != cuda ]] || fail "a C compiler is needed, for Triton's kernels, and none was found;" \
        "for example apt-get install g++"
    [[ $1 == cpu && -z $BUNDLE ]] || return 0
    LEFT_OUT=(reasoning-gym pycosat)
    say "no C compiler (gcc, clang or cc): without reasoning-gym, which needs one; all else works"
}

main() {
    local start=$SECONDS python kind version fingerprint
    if [[ ${1:-} == --launcher ]]; then kind=launcher; elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then kind=cuda; else kind=cpu; fi
    fingerprint=$(cat "${BASH_SOURCE[0]}" "$ROOT/setup.py" "$ROOT/megatron_rl/runtime/versions.py" "$ROOT/requirements"/* \
        <(echo "$kind $ROOT $VENV ${MEGATRON_RL_UNLOCKED:-}") | sha256sum | cut -d' ' -f1)
    [[ ! -x $VENV/bin/python ]] || refuse_other_clone
    if [[ -x $VENV/bin/python && $(cat "$STAMP" 2>/dev/null) == "$fingerprint" ]]; then
        say "$VENV is ready"
        return
    fi

    python=$(find_python) || fail "Python 3.11, 3.12 or 3.13 is needed and none was found" \
        "(python3 is $(python3 --version 2>/dev/null || echo missing)); install one, for example" \
        "apt-get install python3.11 python3.11-venv"
    has_compiler || without_compiler "$kind"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "Python $version, $kind; into $VENV, with details in setup.log there; two to six minutes, once"
    [[ $kind != launcher ]] || say "a second environment, because NeMo-Run and vLLM conflict"
    # A folder without pip is what a Python without its venv package leaves, or one that uv made.
    if [[ ! -x $VENV/bin/python ]] || ! pip --version >/dev/null 2>&1; then
        "$python" -m venv "$VENV" >/dev/null 2>&1 || fail "$python cannot make the virtual" \
            "environment $VENV; on Debian and Ubuntu: apt-get install python$version-venv," \
            "and see that the folder can be written"
    fi
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    rm -f "$STAMP"
    : >"$LOG"
    [[ -z $BUNDLE ]] || use_bundle

    LOCK=$ROOT/requirements/$kind-py${version/./}.txt
    if [[ -n ${MEGATRON_RL_UNLOCKED:-} || $(uname -sm) != "Linux x86_64" || ! -f $LOCK ]]; then
        LOCK=
        say "without a lock: pip resolves the newest supported releases"
    fi
    if [[ $kind == launcher ]]; then install_launcher; else install_training "$version" "$kind"; fi
    echo "$fingerprint" >"$STAMP"
    say "done in $((SECONDS - start)) s"
}

main "$@"
