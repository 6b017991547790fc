#!/usr/bin/env bash
# One part of PNPO changed at a time, in the paper's four-epoch setting; ABLATION names the part.
source "$(dirname "$0")/launch.sh"
case ${ABLATION:-} in
    no_gate) change=objective.constraint.kind=none ;;                # every weight is used as it is
    one_sided) change=objective.constraint.sided=advantage ;;        # rejects as a clip does
    constant_gate) change=objective.constraint.scale=constant ;;     # without sqrt(L/t)
    token_mean) change=objective.aggregation=token_mean ;;           # long responses weigh more
    local_weight) change=objective.weight=token ;;                   # rho_t in place of the prefix's mean
    path_gradient) change=objective.gradient=through_weight ;;          # the gradient flows through the weight
    *) echo "ABLATION=${ABLATION:-}: must be no_gate, one_sided, constant_gate, token_mean," \
        "local_weight or path_gradient" >&2; exit 2 ;;
esac
train r1_distill_1_5b_epochs4.yaml "$change" "$@"
