#!/bin/bash
#PJM -L "node=256,rscunit=rscunit_ft01,rscgrp=small,elapse=35:13:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=1024,max-proc-per-node=4,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N gpt_124m
#PJM -S
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 256 nodes x 4 ranks = DP 512 x TP 2 x PP 1; each tensor-parallel group is inside a node
# micro-batch 2, global batch 1024: 1 micro-batches; recompute none, ZeRO 1
# model: 1.316 s per iteration (nine of ten runs should take 0.9471 to 1.829; never run on an A64FX), 2.481 TFLOPs per node, bubble
# 0.0%, 1909 MiB on the fullest rank
# elapse 35:13:00 in small (the table of 2026-11-20): 95367 iterations and the start take 1 d 11 h (model), 1 jobs in a row and
# 8,949 node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=gpt_124m
NODES=256
RANKS_PER_NODE=4
ELAPSE=${ELAPSE:-126780}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 124m
    --tensor-model-parallel-size 2
    --sequence-parallel
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 2
    --pipeline-model-parallel-size 1
    --global-batch-size 1024
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

START=supervise train train --save "$SAVE" --load "$SAVE"
