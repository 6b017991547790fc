# What every script here ends with: `train CONFIG [key=value ...]`, in one of three ways.
#
#   bash examples/pnpo/SCRIPT.sh                                            on this machine, now
#   LAUNCH=local bash examples/pnpo/SCRIPT.sh                               the same in the background
#   LAUNCH=slurm CLUSTER=my-cluster.yaml NODES=4 bash examples/pnpo/SCRIPT.sh
#
# The last two go through NeMo-Run (docs/slurm.md). Options of `megatron-rl launch`, as --dry-run,
# may stand among the settings.
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

train() {
    local config=examples/pnpo/$1
    shift
    case ${LAUNCH:-} in
        "")
            bash tools/setup_env.sh
            exec "${MEGATRON_RL_VENV:-.venv}/bin/megatron-rl" train --config "$config" "$@"
            ;;
        local | slurm)
            if [[ $LAUNCH == slurm && -z ${CLUSTER:-} ]]; then
                echo "LAUNCH=slurm needs CLUSTER=FILE; copy examples/pnpo/clusters/slurm.yaml and adapt it" >&2
                exit 2
            fi
            bash tools/setup_env.sh --launcher
            exec "${MEGATRON_RL_LAUNCHER_VENV:-.venv-launcher}/bin/megatron-rl" launch "$config" \
                --cluster "${CLUSTER:-examples/pnpo/clusters/local.yaml}" ${NODES:+--nodes "$NODES"} "$@"
            ;;
        *)
            echo "LAUNCH=$LAUNCH: must be local or slurm, or empty" >&2
            exit 2
            ;;
    esac
}
