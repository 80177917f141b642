#!/bin/bash
#PJM -L "node=16x24x16:torus:strict-io,rscunit=rscunit_ft01,rscgrp=large,elapse=24:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=12288,max-proc-per-node=2,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N gpt_30b
#PJM -S
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 6144 nodes as 16x24x16 torus x 2 ranks = DP 384 x TP 8 x PP 4; each tensor-parallel group is on 4 nodes of a 2x3x2 unit
# micro-batch 1, global batch 1536: 4 micro-batches; recompute none, ZeRO 1
# model: 29.28 s per iteration (nine of ten runs should take 21.07 to 40.69; never run on an A64FX), 3.282 TFLOPs per node, bubble
# 9.4%, 12870 MiB on the fullest rank
# elapse 24:00:00 in large (the table of 2026-11-20): 95367 iterations and the start take 32 d 8 h (model), 34 jobs in a row and
# 4,826,621 node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=gpt_30b
NODES=6144
RANKS_PER_NODE=2
RANK_MAP=(16x24x16 "$RANKS_PER_NODE" 8 4)  # node shape, ranks per node, TP, PP
SPARE_NODES=0  # the rank map uses every node
ELAPSE=${ELAPSE:-86400}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 30b
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4
    --pipeline-schedule interleaved
    --num-virtual-stages-per-pipeline-rank 8
    --sequence-parallel
    --tp-comm-overlap
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 1
    --global-batch-size 1536
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

START=supervise train train --save "$SAVE" --load "$SAVE"
