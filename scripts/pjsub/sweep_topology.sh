#!/bin/bash
#PJM -L "node=8x6x8:torus:strict-io,rscunit=rscunit_ft01,rscgrp=small,elapse=03:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0,throttling_state=0,issue_state=0,ex_pipe_state=0"
#PJM --mpi "proc=1536,max-proc-per-node=4,rank-map-bychip"
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --llio localtmp-size=50Gi
#PJM -N sweep_topology
#PJM -S
#PJM --bulk
#PJM --sparam "0-3"
#
# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE
# 384 nodes as 8x6x8 torus x 4 ranks = DP 24 x TP 8 x PP 8; each tensor-parallel group is on 2 nodes of a 2x3x2 unit
# micro-batch 1, global batch 1536: 64 micro-batches; recompute 20 of 48, ZeRO 1
# model: 382 s per iteration (nine of ten runs should take 274.9 to 530.8; never run on an A64FX), 4.584 TFLOPs per node, bubble
# 9.0%, 7267 MiB on the fullest rank
# elapse 03:00:00 in small (the table of 2026-11-20): 10 iterations and the start take 1 h 24 min (model), 1 jobs in a row and 445
# node hours; each job saves and exits 15 minutes before its end
set -euo pipefail

NAME=sweep_topology
NODES=384
RANKS_PER_NODE=4
RANK_MAP=(8x6x8 "$RANKS_PER_NODE" 8 8)  # node shape, ranks per node, TP, PP
SPARE_NODES=0  # the rank map uses every node
ELAPSE=${ELAPSE:-10800}  # seconds, the same as in the directive above
MARGIN=${MARGIN:-900}  # seconds before the end of the job at which the trainer saves and exits
FLAGS=(
    --recipe 30b
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 8
    --pipeline-schedule interleaved
    --num-virtual-stages-per-pipeline-rank 2
    --sequence-parallel
    --tp-comm-overlap
    --zero-stage 1
    --overlap-grad-reduce
    --overlap-param-gather
    --train-iters 10
    --eval-iters 0
    --recompute-granularity full
    --recompute-part-layers 3 3 3 3 3 2 1 1 1 0 0 0 0 0 0 0
    --micro-batch-size 1
    --global-batch-size 1536
    --cpu-frequency 2.0
)

for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"

# Sub-job 0: ranks in node order; 1: the rank map; 2 and 3: the rank map with one all-reduce algorithm for every size
case $PJM_BULKNUM in
    0) MAP= ;;
    2) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm ring) ;;
    3) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm trinaryx3) ;;
esac
train "topology-$PJM_BULKNUM"
