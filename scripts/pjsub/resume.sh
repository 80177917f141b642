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
# 64 nodes x 4 ranks = DP 256 x TP 1 x PP 1; each tensor-parallel group is inside a node
# micro-batch 4, global batch 1024: 1 micro-batches; recompute none, ZeRO 1
# model: 3.541 s per iteration (nine of ten runs should take 2.548 to 4.92; never run on an A64FX), 3.687 TFLOPs per node, bubble
# 0.0%, 3602 MiB on the fullest rank
# elapse 72:00:00 in small (the table of 2026-11-20): 95367 iterations and the start take 3 d 22 h (model), 2 jobs in a row and
# 6,014 node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=gpt_124m_chain
NODES=64
RANKS_PER_NODE=4
ELAPSE=${ELAPSE:-259200}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
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

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

# Each step of the chain continues from the last checkpoint, and exits at once if the run is finished.
START=supervise train train --save "$SAVE" --load "$SAVE"
