#!/bin/bash
# The common part of the job scripts for pjsub: it copies the archive to the nodes, unpacks it and places the ranks.
# The scripts of scripts/pjsub read this file from the checkout; `fugaku-megatron job render` writes it into the script.
#
# The script sets NAME, NODES, RANKS_PER_NODE, ELAPSE, MARGIN, FLAGS and, for a torus, RANK_MAP before this part, and calls `train`
# after it. The variables with a default can also be set by pjsub -x NAME=value, or in the script before this part.
ARCHIVE=${ARCHIVE:-$PWD/fugaku_megatron.tar}    # scripts/build.sh writes it: interpreter, packages, program and data
DATA=${DATA:-mock}                              # prefix of .bin/.idx under data/ of the archive; mock: random tokens
TOKENIZER=${TOKENIZER:-}                        # file or folder of --tokenizer-model under data/; empty: vocab.json and merges.txt
JOB=${PJM_SUBJOBID:-${PJM_JOBID:?submit this file: pjsub -g GROUP FILE}}
SAVE=${SAVE:-$PWD/checkpoints/$NAME}
OUT=${OUT:-$PWD/output/$NAME.$JOB}
TCMALLOC=${TCMALLOC:-}                          # a libtcmalloc.so to preload; without it the trainer caches memory itself
MAX_RESTARTS=${MAX_RESTARTS:-5}                 # after a fault, inside this job
SPARE_NODES=${SPARE_NODES:-0}                   # nodes of the job in addition to NODES, unused until another node fails
LOCAL=${PJM_LOCALTMP:?}/fugaku_megatron         # on each node, for the unpacked archive
MAP=                                            # file for mpiexec --vcoordfile: the node of each rank
MPI_OPTIONS=(
    -mca common_tofu_use_memory_pool 1   # memory stays registered with Tofu instead of being registered for every message
    -mca coll_base_reduce_commute_safe 1 # sums in a fixed order: the same bits in every run
)
# All-reduce algorithm: Fujitsu MPI chooses by size and box. To force one: -mca coll_select_allreduce_algorithm ring|trinaryx3
export PLE_MPI_STD_EMPTYFILE=off  # no output files for ranks that print nothing
export LOCAL ARCHIVE TCMALLOC RANKS_PER_NODE

start_words() {  # start_words LABEL RANKS: sets WORDS to the call of mpiexec; each output folder holds the files of 1000 ranks
    mkdir -p "$OUT/$1"
    WORDS=(mpiexec -n "$2" "${MPI_OPTIONS[@]}" ${MAP:+--vcoordfile "$MAP"}
        -stdout-proc "$OUT/$1/%/1000r/stdout" -stderr-proc "$OUT/$1/%/1000r/stderr")
}

launch() {  # launch LABEL COMMAND: runs the command on all ranks
    local WORDS label=$1
    shift
    start_words "$label" "$(((NODES + SPARE_NODES) * RANKS_PER_NODE))"
    "${WORDS[@]}" "$@"
}

supervise() {  # supervise LABEL COMMAND: the same, and restarts it after a fault without the nodes that do not answer
    local WORDS label=$1 nodes=() clean=(env -u PYTHONHOME -u PYTHONPATH "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}")
    shift
    if [ -n "$MAP" ]; then
        nodes=(--hosts "@$MAP" --spare-nodes "$SPARE_NODES" --ranks-per-node "$RANKS_PER_NODE")
        MAP="{map}" start_words "$label" "{ranks}"
        nodes+=(--launcher "${clean[*]@Q} ${WORDS[*]@Q}")
        WORDS=()
    else
        start_words "$label" "$((NODES * RANKS_PER_NODE))"
        WORDS=("${clean[@]}" "${WORDS[@]}")
    fi
    (use_local; exec "$LOCAL/bin/python3" -m fugaku_megatron supervise --max-restarts "$MAX_RESTARTS" "${nodes[@]}" -- \
        "${WORDS[@]}" "$@")
}

local_rank() { echo "${OMPI_COMM_WORLD_LOCAL_RANK:-${PLE_RANK_ON_NODE:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}}"; }

stage_node() {  # one rank of each node unpacks the archive, and no other rank opens it
    [ "$(local_rank)" = 0 ] || return 0
    mkdir -p "$LOCAL"
    tar -xf "$ARCHIVE" -C "$LOCAL"
}

use_local() {  # use the unpacked files, and no file that thousands of nodes share
    export PYTHONHOME=$LOCAL PYTHONPATH=$LOCAL/app:$LOCAL/site PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
    export LD_LIBRARY_PATH=/lib64:$LOCAL/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export XDG_CACHE_HOME=$LOCAL/cache MPLCONFIGDIR=$LOCAL/cache TORCHINDUCTOR_CACHE_DIR=$LOCAL/cache
    export XOS_MMM_L_PAGING_POLICY=demand:demand:demand  # pages are placed on the CMG of the thread that touches them first
    export FLIB_CNTL_BARRIER_ERR=FALSE                   # Python starts threads that Fujitsu's runtime does not expect
}

run_rank() {  # binds one rank to its share of the NUMA nodes that compute; the NUMA nodes of assistant cores are much smaller
    local node cpus most=0 nodes=() bind=() preload=${LD_PRELOAD:-} each first
    for node in /sys/devices/system/node/node[0-9]*; do
        cpus=("$node"/cpu[0-9]*)
        ((${#cpus[@]} > most)) && most=${#cpus[@]}
    done
    for node in /sys/devices/system/node/node[0-9]*; do
        cpus=("$node"/cpu[0-9]*)
        ((2 * ${#cpus[@]} >= most)) && nodes+=("${node##*node}")
    done
    if command -v numactl >/dev/null && ((${#nodes[@]} % RANKS_PER_NODE == 0)); then
        each=$((${#nodes[@]} / RANKS_PER_NODE))
        first=$((($(local_rank) % RANKS_PER_NODE) * each))
        bind=("${nodes[@]:first:each}")
        bind=(numactl "--cpunodebind=$(IFS=,; echo "${bind[*]}")" "--membind=$(IFS=,; echo "${bind[*]}")")
    fi
    use_local
    if [ -n "$TCMALLOC" ]; then  # before the libraries that are preloaded already
        preload=$TCMALLOC${preload:+:$preload}
        export XOS_MMM_L_HPAGE_TYPE=none  # libmpg's malloc would replace tcmalloc's
    fi
    exec "${bind[@]}" env ${preload:+LD_PRELOAD="$preload"} "$LOCAL/bin/python3" "$@"
}

if [ "$DATA" = mock ]; then
    DATA_FLAGS=(--mock-data)
elif [ -n "$TOKENIZER" ]; then
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --tokenizer-model "$LOCAL/data/$TOKENIZER")
else
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --vocab-file "$LOCAL/data/vocab.json" --merge-file "$LOCAL/data/merges.txt")
fi

minutes_left() { awk "BEGIN {m = ($ELAPSE - $SECONDS - $MARGIN) / 60; print (m > 0.01 ? m : 0.01)}"; }  # at least one iteration

train() {  # train LABEL [flags]: one run on all ranks; START=supervise restarts it after a fault
    local label=$1
    shift
    ${START:-launch} "$label" bash -c "$(declare -f local_rank use_local run_rank); run_rank \"\$@\"" run_rank \
        "$LOCAL/app/pretrain_gpt.py" \
        "${FLAGS[@]}" "${DATA_FLAGS[@]}" --exit-duration-in-mins "$(minutes_left)" "$@"
}

check_layout() {  # check_layout RANKS: compares the layout with one rank, on the first nodes of the job
    local MAP='' WORDS
    start_words check_layout "$1"
    mkdir -p "$SAVE"
    "${WORDS[@]}" bash -c "$(declare -f local_rank use_local run_rank); run_rank \"\$@\"" run_rank \
        "$LOCAL/app/pretrain_gpt.py" "${FLAGS[@]}" "${DATA_FLAGS[@]}" --save "$SAVE" --check-layout
}

echo "copying $ARCHIVE to $NODES nodes"
llio_transfer "$ARCHIVE"  # a copy on every storage node: thousands of compute nodes must not open the same file
trap 'llio_transfer --purge "$ARCHIVE"' EXIT
launch stage bash -c "$(declare -f local_rank stage_node); stage_node"
if [ -n "${RANK_MAP[0]-}" ]; then
    MAP=$LOCAL/rank_map
    (use_local; "$LOCAL/bin/python3" -m fugaku_megatron.jobs.torus "${RANK_MAP[@]}") > "$MAP"
elif ((SPARE_NODES)); then  # nodes by their numbers; the last ones are the spare nodes
    MAP=$LOCAL/rank_map
    for ((node = 0; node < NODES + SPARE_NODES; node++)); do echo "($node)"; done > "$MAP"
fi
