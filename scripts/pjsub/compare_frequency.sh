#!/bin/bash
#PJM -L "node=16,rscunit=rscunit_ft01,rscgrp=small,elapse=01:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=32,max-proc-per-node=2,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N compare_frequency
#PJM -S
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 16 nodes x 2 ranks = DP 32 x TP 1 x PP 1; each tensor-parallel group is inside a node
# micro-batch 16, global batch 1024: 2 micro-batches; recompute none, ZeRO 1
# model: 12.05 s per iteration (nine of ten runs should take 8.673 to 16.75; never run on an A64FX), 4.332 TFLOPs per node, bubble
# 0.0%, 8856 MiB on the fullest rank
# elapse 01:00:00 in small (the table of 2026-11-20): 20 iterations and the start take 24 min 4 s (model), 1 jobs in a row and 2
# node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=compare_frequency
NODES=16
RANKS_PER_NODE=2
ELAPSE=${ELAPSE:-3600}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 124m
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 16
    --train-iters 20
    --eval-iters 0
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --global-batch-size 1024
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

# A job runs at one clock. For another clock submit this file again with options that replace the directives:
#   boost-eco-2.2: pjsub -g GROUP -L "freq=2200,eco_state=2,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0" -x CPU_GHZ=2.2 FILE
#   eco-2.0: pjsub -g GROUP -L "freq=2000,eco_state=2,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0" -x CPU_GHZ=2.0 FILE
CPU_GHZ=${CPU_GHZ:-2.0}
train "clock-$CPU_GHZ" --cpu-frequency "$CPU_GHZ"
echo "table: fugaku-megatron log, this job's $OUT/clock-$CPU_GHZ/0/0/stdout.1.0 and the other jobs'"
echo "its last column has watts and tokens per joule where every node has an energy counter"
