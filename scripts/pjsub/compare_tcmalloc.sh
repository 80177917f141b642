#!/bin/bash
#PJM -L "node=16,rscunit=rscunit_ft01,rscgrp=small,elapse=01:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=16,max-proc-per-node=1,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N compare_tcmalloc
#PJM -S
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 16 nodes x 1 ranks = DP 16 x TP 1 x PP 1; each tensor-parallel group is inside a node
# micro-batch 1, global batch 1024: 64 micro-batches; recompute none, ZeRO 1
# model: 16.59 s per iteration (nine of ten runs should take 11.94 to 23.06; never run on an A64FX), 3.147 TFLOPs per node, bubble
# 0.0%, 2195 MiB on the fullest rank
# elapse 01:00:00 in small (the table of 2026-11-20): 20 iterations and the start take 25 min 35 s (model), 1 jobs in a row and 3
# node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=compare_tcmalloc
NODES=16
RANKS_PER_NODE=1
ELAPSE=${ELAPSE:-3600}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 124m
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --train-iters 20
    --eval-iters 0
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --micro-batch-size 1
    --global-batch-size 1024
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

# The same iterations with three allocators
[ -f "$TCMALLOC" ] || { echo "TCMALLOC '$TCMALLOC' is not a file: pass pjsub -x TCMALLOC=/path/to/libtcmalloc.so" >&2; exit 2; }
preload=$TCMALLOC
TCMALLOC='' train stock --allocator stock
TCMALLOC=$preload train tcmalloc --allocator stock
TCMALLOC='' train tuned --allocator tuned
echo "table: fugaku-megatron log" "$OUT"/{stock,tcmalloc,tuned}/0/0/stdout.1.0
