#!/bin/bash
#PJM -L "node=8x6x8:torus:strict-io,rscunit=rscunit_ft01,rscgrp=small,elapse=72:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=1536,max-proc-per-node=4,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N gpt_1_3b
#PJM -S
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 384 nodes as 8x6x8 torus x 4 ranks = DP 128 x TP 4 x PP 3; each tensor-parallel group is inside a node
# micro-batch 1, global batch 512: 4 micro-batches; recompute none, ZeRO 1
# model: 7.388 s per iteration (nine of ten runs should take 5.317 to 10.27; never run on an A64FX), 3.298 TFLOPs per node, bubble
# 11.8%, 5824 MiB on the fullest rank
# elapse 72:00:00 in small (the table of 2026-11-20): 95367 iterations and the start take 196:04:28 (model), 3 jobs in a row; each
# job saves and exits 15 minutes before its end
set -euo pipefail

NAME=gpt_1_3b
NODES=384
RANKS_PER_NODE=4
RANK_MAP=(8x6x8 "$RANKS_PER_NODE" 4 3)  # node shape, ranks per node, TP, PP
SPARE_NODES=0  # the rank map uses every node
ELAPSE=${ELAPSE:-259200}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 1.3b
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 3
    --pipeline-schedule zbv
    --zero-bubble-max-pending-backward 5
    --sequence-parallel
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 1
    --global-batch-size 512
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

START=supervise train train --save "$SAVE" --load "$SAVE"
