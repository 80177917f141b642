#!/bin/bash
#PJM -L "node=64,rscunit=rscunit_ft01,rscgrp=small,elapse=72:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=256,max-proc-per-node=4,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N gpt_124m_chain
#PJM -S
#PJM --step
#PJM --sparam "jnam=gpt_124m_chain"
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 64 nodes x 4 ranks = DP 256 x TP 1 x PP 1; each tensor-parallel group inside a node
# micro-batch 4, global batch 1024: 1 micro-batches; recompute none, ZeRO 1
# model: 3.541 s per iteration (9 of 10 runs: 2.548 to 4.92), 3.687 TFLOPs per node, bubble 0.0%, 3568 MiB on the fullest rank
# elapse 72:00:00 in small (the table of 2026-11-20): 95367 iterations and the start take 94:08:00 (model), 2 jobs in a row; each
# saves and leaves 15 minutes before its end
set -euo pipefail

RANKS_PER_NODE=4
FLAGS=(
    --recipe 124m
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 4
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --global-batch-size 1024
    --cpu-frequency 2.0
)

NODES=64
SPARE_NODES=${SPARE_NODES:-0}  # asked for beyond NODES
JOB=${PJM_SUBJOBID:-${PJM_JOBID:?submit this file: pjsub -g GROUP FILE}}
LOCAL=${PJM_LOCALTMP:?}/fugaku_megatron
MPI_OPTIONS=(
    -mca common_tofu_use_memory_pool 1   # memory registered with Tofu is kept, not registered for every message
    -mca coll_base_reduce_commute_safe 1 # sums in one fixed order: the same bits in every run
)
# All-reduce algorithm: Fujitsu MPI chooses by size and box. To force one: -mca coll_select_allreduce_algorithm ring|trinaryx3
export PLE_MPI_STD_EMPTYFILE=off  # no files for ranks that print nothing
MAP=

share_archive() { llio_transfer "$ARCHIVE"; }  # a copy on every storage node: no file is opened by thousands of compute nodes
forget_archive() { llio_transfer --purge "$ARCHIVE"; }

start_words() {  # start_words LABEL RANKS: WORDS are mpiexec's own; output of a thousand ranks to a directory
    mkdir -p "$OUT/$1"
    WORDS=(mpiexec -n "$2" "${MPI_OPTIONS[@]}" ${MAP:+--vcoordfile "$MAP"}
        -stdout-proc "$OUT/$1/%/1000r/stdout" -stderr-proc "$OUT/$1/%/1000r/stderr")
}

launch() {  # launch LABEL COMMAND: on all ranks
    local WORDS label=$1
    shift
    start_words "$label" "$(((NODES + SPARE_NODES) * RANKS_PER_NODE))"
    "${WORDS[@]}" "$@"
}

supervise() {  # supervise LABEL COMMAND: the same, started again after a fault, without nodes that do not answer
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

# Paths; each can be given from outside (pjsub -x NAME=value)
ARCHIVE=${ARCHIVE:-$PWD/fugaku_megatron.tar}    # scripts/build.sh writes it: interpreter, packages, program and data
DATA=${DATA:-mock}                              # prefix of .bin/.idx under data/ of the archive; mock: random tokens
TOKENIZER=${TOKENIZER:-}                        # file or folder of --tokenizer-model under data/; empty: vocab.json and merges.txt
SAVE=${SAVE:-$PWD/checkpoints/gpt_124m_chain}
OUT=${OUT:-$PWD/output/gpt_124m_chain.$JOB}
TCMALLOC=${TCMALLOC:-}                          # a libtcmalloc.so to preload; without one the trainer keeps its memory itself
ELAPSE=${ELAPSE:-259200}                      # seconds of the job, as the directive above says
MARGIN=${MARGIN:-900}                      # seconds before its end in which the trainer saves and leaves
MAX_RESTARTS=${MAX_RESTARTS:-5}                 # after a fault, inside this job

local_rank() { echo "${OMPI_COMM_WORLD_LOCAL_RANK:-${PLE_RANK_ON_NODE:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}}"; }

stage_node() {  # one rank of each node unpacks; nobody else opens the archive
    [ "$(local_rank)" = 0 ] || return 0
    mkdir -p "$LOCAL"
    tar -xf "$ARCHIVE" -C "$LOCAL"
}

use_local() {  # what was unpacked, and nothing that thousands of nodes share
    export PYTHONHOME=$LOCAL PYTHONPATH=$LOCAL/app:$LOCAL/site PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
    export LD_LIBRARY_PATH=/lib64:$LOCAL/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export XDG_CACHE_HOME=$LOCAL/cache MPLCONFIGDIR=$LOCAL/cache TORCHINDUCTOR_CACHE_DIR=$LOCAL/cache
    export XOS_MMM_L_PAGING_POLICY=demand:demand:demand  # pages where their thread runs, not all on one CMG
    export FLIB_CNTL_BARRIER_ERR=FALSE                   # Python starts threads that Fujitsu's runtime does not expect
}

run_rank() {  # one rank: bound to its share of the NUMA nodes that compute; those of assistant cores are much smaller
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
    if [ -n "$TCMALLOC" ]; then  # first, before what was preloaded already
        preload=$TCMALLOC${preload:+:$preload}
        export XOS_MMM_L_HPAGE_TYPE=none  # libmpg's malloc would take tcmalloc's place
    fi
    exec "${bind[@]}" env ${preload:+LD_PRELOAD="$preload"} "$LOCAL/bin/python3" "$@"
}

export LOCAL ARCHIVE TCMALLOC RANKS_PER_NODE

if [ "$DATA" = mock ]; then
    DATA_FLAGS=(--mock-data)
elif [ -n "$TOKENIZER" ]; then
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --tokenizer-model "$LOCAL/data/$TOKENIZER")
else
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --vocab-file "$LOCAL/data/vocab.json" --merge-file "$LOCAL/data/merges.txt")
fi

minutes_left() { awk "BEGIN {m = ($ELAPSE - $SECONDS - $MARGIN) / 60; print (m > 0.01 ? m : 0.01)}"; }  # at least one iteration

train() {  # train LABEL [flags]: one run on all ranks
    local label=$1
    shift
    ${START:-launch} "$label" bash -c "$(declare -f local_rank use_local run_rank); run_rank \"\$@\"" run_rank \
        "$LOCAL/app/pretrain_gpt.py" \
        "${FLAGS[@]}" "${DATA_FLAGS[@]}" --exit-duration-in-mins "$(minutes_left)" "$@"
}

echo "staging $ARCHIVE on $NODES nodes"
share_archive
trap forget_archive EXIT
launch stage bash -c "$(declare -f local_rank stage_node); stage_node"
if ((SPARE_NODES)); then  # nodes by their numbers; the last ones are spare
    MAP=$LOCAL/rank_map
    for ((node = 0; node < NODES + SPARE_NODES; node++)); do echo "($node)"; done > "$MAP"
fi

# Each step of the chain continues from the last checkpoint; one that finds the run finished leaves at once.
START=supervise train train --save "$SAVE" --load "$SAVE"
