#!/usr/bin/env bash
# Set up, then check style, types, documentation and tests; a summary at the end.
#
#   bash tools/test.sh                 everything that the environment of the set-up can test
#   bash tools/test.sh slow            tests marked slow: further cases of what the others show, and
#                                      what installs SLURM, a browser, releases of Transformer Engine,
#                                      agents of other frameworks, or an environment from a bundle
#   bash tools/test.sh unit            without the functional tests
#   bash tools/test.sh fast            under a minute: style, types and the most informative unit tests
#
# Exit code 0 only if every part passed. Later parts run even if an earlier one failed.
set -uo pipefail
unset CDPATH # `cd` would print, or go elsewhere

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${MEGATRON_RL_VENV:-$ROOT/.venv}
cd "$ROOT"

case ${1:-all} in
    all) parts=(tests format lint types docs) ;;
    unit) parts=(unit format lint types docs) ;;
    fast) parts=(fast format lint types) ;;
    slow) parts=(slow) ;;
    *) echo "usage: bash tools/test.sh [all|slow|unit|fast]" >&2; exit 2 ;;
esac

# Mathematics, layouts and weight plans, and the training loop with fakes. Tests there that start
# ranks run in the other parts.
FAST=(tests/unit/{objectives,data,preflight,trainer} tests/unit/test_{advantages,architecture,config,refusals}.py
    tests/unit/distributed/test_sequence_{layout,statistics}.py
    tests/unit/resharding/test_{push_schedule,pieces}.py tests/unit/rewards/test_math_answer.py)

# The fast part uses the existing environment.
[[ ${1:-all} == fast && -x $VENV/bin/pytest ]] || bash tools/setup_env.sh || exit 1

# Run two test files at a time: many tests wait, or use one core. The longest files
# come first. A test process that dies fails the command at once: the others would wait for ever.
SIDE_BY_SIDE=(-n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
# Several processes share the cores in these tests, so each uses one thread.
export OMP_NUM_THREADS=1
# Hundreds of processes import the package: it is compiled for the first of them alone.
unset PYTHONDONTWRITEBYTECODE
# No network requests or telemetry.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

run_part() {
    case $1 in
        format) "$VENV/bin/ruff" format --check . ;;
        lint) "$VENV/bin/ruff" check . && "$VENV/bin/python" tools/plain_words.py | tail -n 1 ;;
        types) "$VENV/bin/mypy" ;;
        docs) MEGATRON_RL_VENV=$VENV bash tools/docs.sh ;;
        # A fixed seed makes hypothesis use the same examples each time.
        unit) "$VENV/bin/python" -m pytest tests/unit "${SIDE_BY_SIDE[@]}" \
            -m "not slow" --durations=40 --hypothesis-seed=0 ;;
        fast) "$VENV/bin/python" -m pytest -q "${FAST[@]}" "${SIDE_BY_SIDE[@]}" -m "not slow" \
            --no-processes --hypothesis-seed=0 ;;
        tests) "$VENV/bin/python" -m pytest tests/functional tests/unit/workers tests/unit "${SIDE_BY_SIDE[@]}" \
            -m "not slow" --durations=40 --hypothesis-seed=0 ;;
        slow) "$VENV/bin/python" -m pytest tests/functional tests/unit "${SIDE_BY_SIDE[@]}" \
            -m slow --durations=40 --hypothesis-seed=0 ;;
    esac
}

begin=$SECONDS
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Run a part; its output and its line of the summary are in files, too.
record_part() {
    local start=$SECONDS verdict=passed
    run_part "$1" 2>&1 | tee "$logs/$1" || verdict=FAILED
    printf '%-11s %-7s %4d s  %s\n' \
        "$1" "$verdict" $((SECONDS - start)) "$(tail -n 1 "$logs/$1")" >"$logs/$1.summary"
    [[ $verdict == passed ]]
}

# These use a core each: they run beside the tests, and are printed after them.
declare -A checks
for part in "${parts[@]}"; do
    case $part in format | lint | types | docs) record_part "$part" >/dev/null & checks[$part]=$! ;; esac
done

failed=0
for part in "${parts[@]}"; do
    echo
    echo "=== $part"
    if [[ -v checks[$part] ]]; then
        wait "${checks[$part]}" || failed=1
        cat "$logs/$part"
    else
        record_part "$part" || failed=1
    fi
done

echo
echo "=== summary ($((SECONDS - begin)) s after set-up)"
for part in "${parts[@]}"; do cat "$logs/$part.summary"; done
exit "$failed"
