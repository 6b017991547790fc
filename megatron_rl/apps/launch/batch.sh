# The part of a SLURM batch script before srun; slurm.py sets the variables in lower case above it:
# exits stalls first_status metrics interrupted requeue link preempt_after.
unset SLURM_UNBUFFEREDIO  # with it ranks write to terminals, and draw progress bars
began=$(date +%s)

is_interrupted() { case " $interrupted " in *" $1 "*) ;; *) false ;; esac; }
hung() { [ -n "$(find "$stalls" -type f -newermt "@$began" 2>/dev/null)" ]; }
all_nodes_answer() {
    timeout 60 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --ntasks="$SLURM_JOB_NUM_NODES" true
}
rows() { wc -l <"$metrics" 2>/dev/null || echo 0; }

if [ "$link" -gt 1 ]; then  # the previous job of the chain has to leave something to do
    earlier=$(tail -n 1 "$exits" 2>/dev/null | cut -d" " -f3)
    [ -z "$earlier" ] || is_interrupted "$earlier" || exit "$earlier"
fi

# Append the exit to the file, and requeue a job that was interrupted and had time to save, that
# hung, or that lost a node: its other ranks fail long before SLURM notices. SLURM itself requeues
# jobs that it preempts without grace time, and a job that a user cancels must stay cancelled:
# therefore only a job that is still running is requeued.
finish() {
    status=$?
    set +e
    [ "$status" -ne 0 ] && status=$(cat "$first_status" 2>/dev/null || echo $status)
    [ "$status" -ne 0 ] && hung && status=75  # ended by the watchdog
    kill $preemption 2>/dev/null
    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $status" >>"$exits"
    [ "$status" -ne 0 ] || return
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ] || return
    again=""
    if is_interrupted "$status"; then
        again='it was interrupted'
    elif ! all_nodes_answer; then
        again='a node does not answer'
    fi
    if [ -n "$again" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeue" ]; then
        echo "queued again: $again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
trap finish EXIT
trap 'exit 143' TERM  # else the status would be that of the command before srun

if [ -n "$preempt_after" ] && [ "$link" -eq 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then
    (
        first=$(rows)
        [ "$first" -eq 0 ] && first=1  # the row of step 0
        until [ "$(rows)" -ge $((first + preempt_after)) ]; do sleep 1; done
        echo "simulating a preemption"
        scancel --signal=TERM "$SLURM_JOB_ID"
    ) &
    preemption=$!
fi
