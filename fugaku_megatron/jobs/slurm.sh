#!/bin/bash
# The common part of the Slurm scripts: it starts the run, restarts it after a fault, and puts the job back into the queue before its
# time limit. A script of scripts/slurm sets FLAGS and reads this file. The variables with a default can be set by
# sbatch --export=ALL,NAME=value; the words after the script's name are further training flags.
HERE=${FUGAKU_MEGATRON:-$SLURM_SUBMIT_DIR}    # the program's folder, on a shared file system
PYTHON=${PYTHON:-$HERE/.venv/bin/python}
LAUNCHER=${LAUNCHER:-srun}                    # srun, or the mpiexec of an MPI that was built with Slurm's support
PMI=${PMI:-}                                  # for srun: pmix for Open MPI, pmi2 for MPICH; empty: the site's default
DATA=${DATA:-mock}                            # prefix of .bin/.idx, with VOCAB and MERGES or TOKENIZER; mock: random tokens
TOKENIZER=${TOKENIZER:-}                      # file or folder of --tokenizer-model; add --tokenizer-type to the flags
SAVE=${SAVE:-$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_NAME}
SPARE_NODES=${SPARE_NODES:-0}                 # how many of --nodes stay unused until another node fails
MAX_RESTARTS=${MAX_RESTARTS:-5}               # after a fault, inside this job
CHECK_RANKS=${CHECK_RANKS:-0}                 # so many ranks first compare the layout with one rank (docs/reliability.md)
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS    # since Slurm 22.05 srun does not inherit this from sbatch

if [ ! -f "$HERE/pretrain_gpt.py" ] || ! command -v "$PYTHON" >/dev/null; then
    echo "$HERE/pretrain_gpt.py or $PYTHON was not found: run make setup in the checkout, or set FUGAKU_MEGATRON and PYTHON" >&2
    exit 2
fi
case $LAUNCHER in
    srun) LAUNCH="srun --nodes={nodes} --nodelist={hosts} --ntasks={ranks} --kill-on-bad-exit=1 --cpu-bind=cores"
        LAUNCH+=${PMI:+" --mpi=$PMI"} ;;
    *) LAUNCH="$LAUNCHER -n {ranks} --host {slots}" ;;
esac
if [ "$DATA" = mock ]; then
    DATA_FLAGS=(--mock-data)
elif [ -n "$TOKENIZER" ]; then
    DATA_FLAGS=(--data-path "$DATA" --tokenizer-model "$TOKENIZER")
else
    DATA_FLAGS=(--data-path "$DATA" --vocab-file "${VOCAB:?set VOCAB to the vocab.json of DATA}"
        --merge-file "${MERGES:?set MERGES to the merges.txt of DATA}")
fi
RANKS_PER_NODE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

check_layout() {  # ends the job if the layout trains differently
    local nodes=$(((CHECK_RANKS + RANKS_PER_NODE - 1) / RANKS_PER_NODE)) used words
    used=("${HOSTS[@]:0:nodes}")
    words=${LAUNCH//"{nodes}"/$nodes}
    words=${words//"{ranks}"/$CHECK_RANKS}
    words=${words//"{hosts}"/$(IFS=,; echo "${used[*]}")}
    words=${words//"{slots}"/$(IFS=,; echo "${used[*]/%/:$RANKS_PER_NODE}")}
    mkdir -p "$SAVE"
    # shellcheck disable=SC2086 # a command and its arguments
    $words "$PYTHON" "$HERE/pretrain_gpt.py" "${FLAGS[@]}" "${DATA_FLAGS[@]}" --save "$SAVE" "$@" --check-layout
}
if ((CHECK_RANKS && ! ${SLURM_RESTART_COUNT:-0})); then
    check_layout "$@"
fi

# After a fault the run restarts from SAVE: on a spare node, otherwise on fewer nodes with the same global batch.
# Before the time limit Slurm sends a signal to this shell. The trainer saves after its iteration and exits, and the job goes back into
# the queue under the same number, to resume from SAVE. A job whose trainer exits without this signal is finished and not queued again.
leaving=0
trainer=
trap 'leaving=1; kill -USR1 "$trainer" 2>/dev/null || true' USR1
trap 'kill -TERM "$trainer" 2>/dev/null || true' TERM
"$PYTHON" -m fugaku_megatron supervise --max-restarts "$MAX_RESTARTS" --spare-nodes "$SPARE_NODES" \
    --hosts "$(IFS=,; echo "${HOSTS[*]}")" --ranks-per-node "$RANKS_PER_NODE" --launcher "$LAUNCH" -- \
    "$PYTHON" "$HERE/pretrain_gpt.py" "${FLAGS[@]}" "${DATA_FLAGS[@]}" --save "$SAVE" --load "$SAVE" "$@" &
trainer=$!
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do  # a signal ends wait before the trainer has saved
    code=0
    wait "$trainer" || code=$?
done
if [ "$leaving" = 1 ] && [ "$code" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
