#!/usr/bin/env bash
# Set up, then check everything: style, types, documentation, all tests; a summary at the end.
#
#   bash tools/test.sh                 everything
#   bash tools/test.sh unit            without the functional tests
#   bash tools/test.sh fast            under a minute: style, types and the unit tests that tell most
#
# Exit code 0 only if every part passed. Later parts run even if an earlier one failed.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${MEGATRON_RL_VENV:-$ROOT/.venv}
cd "$ROOT"

case ${1:-all} in
    all) parts=(format lint types docs tests) ;;
    unit) parts=(format lint types docs unit) ;;
    fast) parts=(format lint types fast) ;;
    *) echo "usage: bash tools/test.sh [all|unit|fast]" >&2; exit 2 ;;
esac

# The mathematics, the plans of layouts and weights, the loop around fakes. Tests there that start
# ranks or go through every case of something (marked slow) are left to the other parts.
FAST=(tests/unit/{objectives,data,preflight,trainer} tests/unit/test_{advantages,architecture,config}.py
    tests/unit/distributed/test_sequence_{layout,statistics}.py
    tests/unit/resharding/test_{plan,pieces}.py tests/unit/rewards/test_math_answer.py)

# For the inner loop what was set up before will do.
[[ ${1:-all} == fast && -x $VENV/bin/pytest ]] || bash tools/setup_env.sh || exit 1

# Two files of tests at a time: many tests wait for something, or use one core. What takes longest
# comes first.
SIDE_BY_SIDE=(-n 2 --dist loadfile --no-loadscope-reorder)
# Several processes share the cores in these tests; threads of their own would only fight.
export OMP_NUM_THREADS=1
# Nothing is looked up or reported anywhere.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

run_part() {
    case $1 in
        format) "$VENV/bin/ruff" format --check . ;;
        lint) "$VENV/bin/ruff" check . ;;
        types) "$VENV/bin/mypy" ;;
        docs) MEGATRON_RL_VENV=$VENV bash tools/docs.sh ;;
        # The same examples each time; without the seed hypothesis looks for new ones.
        unit) "$VENV/bin/python" -m pytest tests/unit "${SIDE_BY_SIDE[@]}" --hypothesis-seed=0 ;;
        fast) "$VENV/bin/python" -m pytest -q "${FAST[@]}" "${SIDE_BY_SIDE[@]}" -m "not slow" \
            --no-processes --hypothesis-seed=0 ;;
        tests) "$VENV/bin/python" -m pytest tests/functional tests/unit "${SIDE_BY_SIDE[@]}" \
            --hypothesis-seed=0 ;;
    esac
}

summary=()
failed=0
begin=$SECONDS
for part in "${parts[@]}"; do
    echo
    echo "=== $part"
    start=$SECONDS
    output=$(mktemp)
    if run_part "$part" 2>&1 | tee "$output"; then verdict=passed; else verdict=FAILED failed=1; fi
    summary+=("$(printf '%-11s %-7s %4d s  %s' \
        "$part" "$verdict" $((SECONDS - start)) "$(tail -n 1 "$output")")")
    rm -f "$output"
done

echo
echo "=== summary ($((SECONDS - begin)) s after set-up)"
printf '%s\n' "${summary[@]}"
exit "$failed"
