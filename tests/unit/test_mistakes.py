"""Wrong flags and arguments that need no file to be refused: each is one line, before any work."""

import shlex
from dataclasses import fields
from typing import Any

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import build_parser, field_values, interpret, make_run
from fugaku_megatron.cli.names_elsewhere import EQUIVALENTS
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.fields import flag
from fugaku_megatron.config.run_config import GROUPS
from fugaku_megatron.planner import progress
from fugaku_megatron.run.plan import Plan

PARSER = build_parser()
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--vocab-size 96 --train-iters 20"
)
EXPERTS_WITH_BIASES = (
    f"{SMALL} --num-experts 8 --swiglu --normalization RMSNorm --moe-ffn-hidden-size 24 "
    "--moe-router-topk 2"
)
EXPERTS = f"{EXPERTS_WITH_BIASES} --disable-bias-linear"
LORA = f"{SMALL} --lora-rank 4 --pretrained-checkpoint base"
POSITIVE = """
--num-layers --hidden-size --num-attention-heads --ffn-hidden-size --seq-length --max-position-embeddings --vocab-size
--make-vocab-size-divisible-by --init-method-std --layernorm-epsilon --embedding-multiplier --residual-multiplier --logits-scaling
--tensor-model-parallel-size --pipeline-model-parallel-size --micro-batch-size --global-batch-size --lr --lr-decay-iters
--lr-decay-samples --lr-decay-tokens --adam-eps --loss-scale --initial-loss-scale --min-loss-scale
--loss-scale-window --hysteresis --train-samples --exit-interval --exit-duration-in-mins --eval-interval --recompute-num-layers
--save-interval --save-interval-in-mins --keep-last --log-interval --ckpt-step --decoupled-lr --ddp-bucket-size
--loss-spike-deviations --lora-rank --rotary-seq-len-interpolation-factor --memory-per-rank
""".split()
NOT_NEGATIVE = """
--min-lr --weight-decay --clip-grad --lr-warmup-iters --lr-warmup-samples --lr-wsd-decay-iters
--start-weight-decay --end-weight-decay --train-iters
--eval-iters
""".split()
FRACTIONS = "--hidden-dropout --attention-dropout --adam-beta1 --adam-beta2 --lora-dropout".split()
FINITE = """
--init-method-std --layernorm-epsilon --lr --min-lr --adam-eps --weight-decay --clip-grad --loss-scale --initial-loss-scale
""".split()


def on(ranks: int) -> str:
    return f"--recipe 124m --dry-run --world-size {ranks}"


# Flags of a valid run -> rows of (further flags, the line that refuses them). " ... " is any text.
FLAGS = {
    # Words of a command line
    SMALL: [
        ("--num-layer 3", "unknown flag --num-layer: did you mean --num-layers?"),
        (
            "--tensor-model-paralell-size=2",
            "unknown flag --tensor-model-paralell-size=2: did you mean --tensor-model-parallel-size?",
        ),
        ("--quux 3", "unknown flag --quux: see --help"),
        # Names of other programs
        ("--learning-rate 1", "unknown flag --learning-rate: did you mean --lr?"),
        ("--learning_rate=1", "unknown flag --learning_rate=1: did you mean --lr?"),
        (
            "--num_train_epochs 3",
            "did you mean --train-iters, where an epoch is the number of samp",
        ),
        ("--output-dir x", "unknown flag --output-dir: did you mean --save?"),
        (
            "--model-name-or-path x",
            "did you mean --pretrained-checkpoint, the --save of fugaku-megatron convert --from-hf?",
        ),
        (
            "--max-steps 3 --quux --gradient_accumulation_steps 8",
            "unknown flags --max-steps (did you mean --train-iters?), --quux, "
            "--gradient_accumulation_steps (did you mean --global-batch-size, the samples of",
        ),
        (
            "stray",
            "--train-iters takes one value, and 2 words follow it, 20 stray: leave out stray",
        ),
        (
            "--step-batch-size-schedule 0:1 2.4B:320",
            "--step-batch-size-schedule takes one value, and 2 words follow it, 0:1 2.4B:320: "
            "put them in quotes, --step-batch-size-schedule '0:1 2.4B:320'",
        ),
        (
            "--step-batch-size-schedule=0:1 2.4B:320 9B:4 --bf16",
            " 3 words follow it, 0:1 2.4B:320 9B:4: put them in quotes",
        ),
        ("--bf16 yes", "--bf16 takes no value: leave out yes"),
        (
            "--rampup-batch-size 1 2 3 4",
            "--rampup-batch-size takes 3 values, and 4 words follow it, 1 2 3 4: leave out 4",
        ),
        ("--num-layers x", "argument --num-layers/--encoder-num-layers: invalid int value: 'x'"),
        ("--num-layers", "argument --num-layers/--encoder-num-layers: expected one argument"),
        ("--lr-decay-style stepwise", "argument --lr-decay-style: invalid choice: 'stepwise'"),
        ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
        ("--world-size 4", "--world-size 4 goes with --dry-run"),
        ("--dry-run --world-size 0", "--world-size is 0"),
        (
            "--recipe 124n",
            "--recipe 124n is unknown: pass one of demo, 124m, ... did you mean 124m",
        ),
        # The range of one value
        *(
            (f"{name} {n}", f"{name} is {n} ... : pass a number above 0")
            for name in POSITIVE
            for n in (0, -1)
        ),
        *((f"{name} -1", f"{name} is -1 ... : pass 0 or more") for name in NOT_NEGATIVE),
        *(
            (f"{name} {n}", f"{name} is {n}: pass a number from 0 to below 1")
            for name in FRACTIONS
            for n in (-0.1, 1.0)
        ),
        *((f"{name} inf", f"{name} is inf: pass a finite number") for name in FINITE),
        ("--rotary-percent 1.5", "--rotary-percent is 1.5: pass a number above 0, and 1 at most"),
        ("--lr-warmup-fraction 1.1", "--lr-warmup-fraction is 1.1: pass a number from 0 to 1"),
        ("--seed -1", "--seed is -1: pass a number from 0 to 4294967295"),
        (f"--seed {2**32}", "--seed is 4294967296: pass at most 4294967295"),
        (f"--num-layers {10**20}", "--num-layers is a number of 21 digits: pass at most 4096"),
        (f"--hidden-size {10**9}", "--hidden-size is 1000000000: pass at most 1048576"),
        (f"--micro-batch-size {10**9}", "--micro-batch-size is 1000000000: pass at most"),
        (
            f"--global-batch-size 8 --rampup-batch-size 1 1 {10**30}",
            "--rampup-batch-size is a number of 31 digits: pass at most",
        ),
        *(
            (
                f"--fp16-accumulation-chunk {chunk}",
                f"--fp16-accumulation-chunk is {chunk}: pass a number from 1 to 65536",
            )
            for chunk in (-1, 0, 65537)
        ),
        *(
            (f"--{name} ''", f"--{name} is empty: pass a directory")
            for name in ("save", "load", "tensorboard-dir", "profile-dir")
        ),
        ("--pretrained-checkpoint ''", "--pretrained-checkpoint is empty"),
        # The model
        (
            "--num-attention-heads 5",
            "--hidden-size 32 is not divisible by --num-attention-heads 5: change one",
        ),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-attention-heads 4 is not divisible by --num-query-groups 3",
        ),
        ("--swiglu --geglu", "--swiglu and --geglu exclude each other: pass one"),
        ("--squared-relu --swiglu", "--swiglu and --squared-relu exclude each other"),
        ("--qk-layernorm --normalization PlainLayerNorm", "--qk-layernorm is for LayerNorm and"),
        ("--qk-layernorm-all-heads", "--qk-layernorm-all-heads needs --qk-layernorm"),
        ("--residual-multiplier 0.5", "--residual-multiplier 0.5 would leave out the biases: pass"),
        (
            "--attention-multiplier 0.5",
            "--attention-multiplier 0.5 is computed with rope of whole heads",
        ),
        (
            "--kv-channels 6",
            "--kv-channels is 6, ... kernels take multiples of 4: pass one, or --kernels torch",
        ),
        ("--hidden-size 24", "--kv-channels is 6, by default hidden size / attention heads"),
        ("--position-embedding-type rope --kv-channels 7", "of a head of 7 is 7: change it"),
        *(
            (f"--window-size {text}", f"--window-size '{text}': pass LEFT,0")
            for text in ("4", "4,1", "x,0")
        ),
        (
            "--max-position-embeddings 15",
            "--max-position-embeddings 15 is below --seq-length 16: raise",
        ),
        ("--padded-vocab-size 64", "--padded-vocab-size 64 is below --vocab-size 96"),
        ("--position-embedding-type yarn --rotary-percent 0.5", "yarn turns whole heads"),
        (
            "--position-embedding-type yarn --use-rope-scaling",
            "--use-rope-scaling and --position-embedding-type yarn scale the angles",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-dynamic-factor 2",
            "--rope-dynamic-factor scale the angles of rope",
        ),
        (
            "--position-embedding-type rope --rope-dynamic-factor -1",
            "--rope-dynamic-factor is -1.0: pass a number above 0",
        ),
        (
            "--position-embedding-type rope --rope-dynamic-factor 2 --kv-channels 2",
            "needs at least 4 rotated elements of a head",
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale -9",
            "--mscale -9.0 and --mscale-all-dim 0.0 multiply",
        ),
        (
            "--position-embedding-type yarn --yarn-beta-fast 1",
            "--yarn-beta-fast 1.0 is not above --yarn-beta-slow 1.0",
        ),
        # Batches and the length of the run
        ("--rampup-batch-size 1 1 8", "--rampup-batch-size needs --global-batch-size"),
        *(
            (
                f"--rampup-batch-size {numbers} --global-batch-size 64",
                f"--rampup-batch-size {message}",
            )
            for numbers, message in (
                (
                    "16 10 100",
                    "16 10 100: --global-batch-size 64 minus start 16 is 48, not a multiple of the increment 10",
                ),
                ("128 8 100", "128 8 100: --global-batch-size 64 minus start 128 is -64"),
                ("0 8 100", "0 8 100: start and increment must be at least 1"),
                ("8 0 100", "8 0 100: start and increment must be at least 1"),
                ("8 8 -1", "8 8 -1: ... samples at least 0"),
            )
        ),
        (
            f"--rampup-batch-size 1 1 100 --global-batch-size {2**24}",
            "16777215 steps to --global-batch-size 16777216: pass an increment",
        ),
        *(
            (f"--step-batch-size-schedule '{text}'", "the first step must begin at 0")
            for text in ("", "5:4")
        ),
        *(
            (f"--step-batch-size-schedule '{text}'", f"{text.split()[-1]} is not TOKENS:SIZE")
            for text in ("0:4 5", "0:0", "0:4 1X:8")
        ),
        ("--step-batch-size-schedule '0:4 9:8 9:16'", "every step must begin"),
        (
            "--step-batch-size-schedule '0:4 9:8' --rampup-batch-size 1 1 1 --global-batch-size 8",
            "exclude each other",
        ),
        (
            "--step-batch-size-schedule '0:4 9:8' --global-batch-size 4",
            "--global-batch-size 4 is not the last size",
        ),
        (
            "--step-batch-size-schedule '0:3 1M:16'",
            "--step-batch-size-schedule '0:3 1M:16': its batch size 3 is not",
        ),
        ("--train-samples 1", "--train-iters and --train-samples exclude each other"),
        # The optimizer
        ("--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001 is above --lr 0.0001"),
        ("--lr 1e-4 --lr-warmup-init 1e-3", "--lr-warmup-init 0.001 is above --lr 0.0001"),
        ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-4", "--decoupled-lr 1e-05 is below 0.0001"),
        ("--decoupled-lr 1e-5 --min-lr 2e-5", "--decoupled-lr 1e-05 is below 2e-05"),
        (
            "--lr-decay-style WSD",
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples",
        ),
        (
            "--lr-decay-iters 5 --lr-decay-tokens 10",
            "--lr-decay-iters and --lr-decay-tokens exclude each other",
        ),
        (
            "--lr-warmup-iters 1 --lr-warmup-samples 1",
            "--lr-warmup-iters and --lr-warmup-samples exclude",
        ),
        *(
            (
                f"--lr-{name}-samples 4",
                "--lr-decay-samples and --lr-warmup-samples go with --train-samples",
            )
            for name in ("decay", "warmup")
        ),
        (
            "--no-load-optim --use-checkpoint-opt-param-scheduler",
            "goes with neither --no-load-lr-state",
        ),
        (
            "--exp-avg-dtype bf16",
            "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer, as in Megatron-LM",
        ),
        (
            "--exp-avg-sq-dtype fp8 --use-precision-aware-optimizer",
            "--exp-avg-sq-dtype fp8: moments lie below the range of FP8, and the scale of each tensor that it needs is not supported: ",
        ),
        (
            "--start-weight-decay 0.1",
            "--start-weight-decay 0.1 has no effect with --weight-decay-incr-style",
        ),
        (
            "--start-weight-decay 0.2 --end-weight-decay 0.1 --weight-decay-incr-style cosine",
            "--end-weight-decay 0.1 is below --start-weight-decay 0.2",
        ),
        (
            "--optimizer muon --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8",
            "--exp-avg-dtype int8 is supported with AdamW, not with --optimizer muon: pass bf16",
        ),
        *(
            (
                f"--optimizer muon --muon-num-ns-steps {steps}",
                f"--muon-num-ns-steps {steps}: ... : pass ",
            )
            for steps in (6, 9, 11)
        ),
        # Precision and kernels
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        (
            "--initial-loss-scale 4 --min-loss-scale 8",
            "--min-loss-scale 8.0 is above --initial-loss-scale",
        ),
        (
            "--fp16-accumulation-chunk 64",
            "--fp16-accumulation-chunk 64 is for --fp16, and this run is fp32: pass",
        ),
        (
            "--fp16-accumulation-chunk 64 --fp16 --kernels torch",
            "--fp16-accumulation-chunk 64 is for the C++ kernels, and --kernels is torch: pass",
        ),
        (
            "--fp32-matmul bf16x3 --bf16",
            "--fp32-matmul bf16x3 is for FP32, and this run is bf16: leave it out",
        ),
        (
            "--fp32-matmul bf16x3 --kernels torch",
            "--fp32-matmul bf16x3 is for the C++ kernels, and --kernels is torch: pass",
        ),
        ("--int8-wgrad", "--int8-wgrad is for --int8: pass --int8 too, or leave it out"),
        (
            "--int8-stochastic-rounding",
            "--int8-stochastic-rounding is for --int8: pass --int8 too, or leave it out",
        ),
        ("--int8-head --bf16", "--int8-head is for --int8: pass --int8 too, or leave it out"),
        (
            "--int8 --kernels torch",
            "--int8 is for the C++ kernels, and --kernels is torch: pass native or auto, or leave",
        ),
        (
            "--int8 --fp32-matmul bf16x3",
            "--int8 does not work with --fp32-matmul bf16x3: leave one of them out",
        ),
        (
            "--int8 --fp16 --fp16-accumulation-chunk 64",
            "--int8 does not work with --fp16-accumulation-chunk: leave one of them out",
        ),
        ("--int8 --abft all", "--int8 does not work with --abft: leave one of them out"),
        # Data, checkpoints and adapters
        ("--vocab-file v", "--vocab-file is v and --merge-file is None: pass both or neither"),
        ("--mock-data --data-path a", "--mock-data and --data-path exclude each other"),
        (
            "--data-path a --train-data-path b",
            "--data-path and --train-data-path exclude each other",
        ),
        (
            "--mock-data --train-data-path b",
            "--mock-data and --train-data-path exclude each other",
        ),
        (
            "--data-path a --valid-data-path b",
            "--valid-data-path goes with --train-data-path",
        ),
        (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "exclude each other",
        ),
        (
            "--mean-document-length 512",
            "--mean-document-length 512 is for runs whose attention ends with a document: pass",
        ),
        ("--sft --mock-data", "--sft reads chats, and --mock-data are random tokens"),
        (
            "--sft --eod-mask-loss",
            "--eod-mask-loss leaves out what follows the end of a text: leave one out",
        ),
        ("--ckpt-step 5", "--ckpt-step 5 needs --load"),
        ("--load a --save a --finetune", "--finetune starts at iteration 0, and would replace"),
        ("--load a --finetune --pretrained-checkpoint b", "exclude each other"),
        *(
            (f"--skip-samples={text}", "--skip-samples ... pass FIRST:END")
            for text in ("5", ":7", "-1:5", "a:b", "1:2:3", "1:2,", "", "1.0:2", "٣:٥")
        ),
        *(
            (f"--skip-samples {text}", "--skip-samples ... FIRST must be below END")
            for text in ("7:5", "5:5", "0:2000000000000")
        ),
    ],
    # The layout
    on(10): [
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
            "world size 10 ... --tensor-model-parallel-size 2 ... --pipeline-model-parallel-size 4 ... start 8 or 16 ranks",
        ),
        (
            "--pipeline-model-parallel-size 5 --pipeline-split even",
            "--num-layers 12 is not divisible by --pipeline-model-parallel-size 5",
        ),
    ],
    on(3): [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", "start 8 ranks"),
        (
            "--global-batch-size 16",
            "--global-batch-size 16 is not divisible by --micro-batch-size 1 x data-parallel size 3 = 3: use 15 or 18",
        ),
    ],
    on(4): [
        (
            "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
            "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4: change one of",
        ),
        (
            "--num-attention-heads 6 --tensor-model-parallel-size 4",
            "--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            "--num-attention-heads 6 --context-parallel-size 4 --cp-comm-type a2a",
            "6 is not divisible by ... --cp-comm-type a2a ... or pass --cp-comm-type p2p",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-split 9,4",
            "--pipeline-split 9,4 has 2 stages and 13 layers, ... pass 2 numbers that sum to 12",
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-split 4,4,4", "has 3 stages and 12 layers"),
    ],
    on(26): [
        (
            "--pipeline-model-parallel-size 13",
            "--num-layers 12 is below --pipeline-model-parallel-size 13",
        ),
    ],
    on(2): [
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 1023",
            "--seq-length 1023 is not divisible by --tensor-model-parallel-size 2, into which "
            "--sequence-parallel cuts it: change one, or leave the flag out",
        ),
        (
            "--micro-batch-size 2 --global-batch-size 7",
            "--global-batch-size 7 is not divisible by --micro-batch-size 2 x data-parallel size 2 = 4: use 4 or 8",
        ),
        (
            "--micro-batch-size 2 --global-batch-size 16 --rampup-batch-size 2 2 100",
            "--rampup-batch-size 2 2 100: its batch size 2 is not divisible by ... = 4: pass ... multiples of 4",
        ),
        (
            "--micro-batch-size 2 --global-batch-size 16 --rampup-batch-size 4 6 100",
            "--rampup-batch-size 4 6 100: its batch size 10 is not divisible",
        ),
        (
            "--norm-placement post",
            "--norm-placement post normalises outputs without biases: pass --disable-bias-linear",
        ),
        (
            "--norm-placement both --disable-bias-linear --parallel-residual",
            "--norm-placement both and --parallel-residual exclude each other: leave one out",
        ),
        ("--parallel-shared-norm", "--parallel-shared-norm needs --parallel-residual: pass both"),
        (
            "--context-parallel-size 2 --cp-comm-type a2a --normalization RMSNorm --qk-layernorm --qk-layernorm-all-heads",
            "--cp-comm-type a2a leaves ... all of them: pass --cp-comm-type p2p",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type ring",
            "--cp-comm-type ring: pass p2p, allgather, a2a or a2a+p2p",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a a2a a2a",
            "--cp-comm-type has 3 values: pass one, or one for each of --num-layers 12",
        ),
        (
            "--lora-rank 4 --pretrained-checkpoint base --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "--lora-rank 4 is not supported with --tp-comm-overlap",
        ),
    ],
    f"{on(2)} --pipeline-model-parallel-size 2": [
        (
            "--recompute-part-layers 1 0",
            "--recompute-part-layers 1 0 needs --recompute-granularity full, and it is None",
        ),
        (
            "--recompute-granularity full --recompute-part-layers 1 -1",
            "--recompute-part-layers 1 -1: pass 0 or more",
        ),
        (
            "--recompute-granularity full --recompute-part-layers 1 1 --recompute-method block",
            "--recompute-method block",
        ),
        (
            "--recompute-granularity full --recompute-part-layers 1 1 1",
            "has 3 numbers ... makes 2 parts: pass 2",
        ),
        (
            "--pipeline-schedule auto --num-virtual-stages-per-pipeline-rank 2",
            "rank 2 is for --pipeline-schedule interleaved and zb-h1, not auto",
        ),
        (
            "--pipeline-schedule auto --zero-bubble-max-pending-backward 3",
            "--zero-bubble-max-pending-backward 3 is for --pipeline-schedule zb-h1 and zbv, not auto",
        ),
    ],
    on(1): [
        (
            "--zero-stage 1 --overlap-param-gather",
            "--overlap-param-gather needs --overlap-grad-reduce: pass both",
        ),
        (
            "--overlap-param-gather --overlap-grad-reduce",
            "needs --use-distributed-optimizer, and --zero-stage is 0",
        ),
        (
            "--recompute-auto --recompute-granularity full",
            "--recompute-auto and --recompute-granularity full exclude",
        ),
        ("--abft=-1", "--abft -1: pass numbers of layers, from 0, or all"),
        ("--abft 0 12", "--abft 12: the model has layers 0 to 11: pass some of them, or all"),
        ("--abft all --kernels torch", "--abft is for the C++ kernels"),
        ("--abft all --fp16 --fp16-accumulation-chunk 64", "--abft is for the C++ kernels"),
    ],
    "--recipe 124m --train-samples 8 --micro-batch-size 1": [
        (f"--lr-{name}-iters 4", "--train-samples goes with --lr-decay-samples")
        for name in ("decay", "warmup")
    ],
    # Experts
    EXPERTS: [
        ("--moe-layer-freq 0", "--moe-layer-freq '0': pass a number above 0, or a list of 0 and 1"),
        (
            "--moe-layer-freq \"__import__('os')\"",
            "pass a number above 0, or a list of 0 and 1",
        ),
        ("--moe-layer-freq [1]*10**9", "pass a number above 0, or a list of 0 and 1"),
        (
            "--moe-layer-freq [0,1,1]",
            "--moe-layer-freq [0,1,1] has 3 layers, and --num-layers is 2",
        ),
        ("--moe-layer-freq [0]*2", "has no layer with experts"),
        ("--moe-router-topk 9", "--moe-router-topk 9 is above --num-experts 8"),
        ("--moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        (
            "--moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
        ),
        *(
            (
                f"--moe-router-num-groups {groups}",
                f"--moe-router-num-groups is {groups} and --moe-router-group-topk is None: pass both",
            )
            for groups in (4, 3)  # 3 divides no 8 experts, either
        ),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 2 --moe-router-topk 4",
            "--num-experts 8 is not divisible by --moe-router-num-groups 3",
        ),
        (
            "--moe-router-load-balancing-type global_aux_loss",
            "--moe-router-load-balancing-type global_aux_loss is not supported",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "sinkhorn excludes other types",
        ),
        ("--moe-aux-loss-coeff 0.1 0.2", "has 1 words and --moe-aux-loss-coeff 2 numbers"),
        (
            "--moe-shared-expert-gate",
            "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size",
        ),
    ],
    EXPERTS_WITH_BIASES: [
        (
            "--moe-shared-expert-intermediate-size 64",
            "--moe-shared-expert-intermediate-size 64 is computed without biases: pass --disable-bias-linear",
        ),
        ("--xielu", "--xielu is for MLPs without experts: leave out --num-experts"),
    ],
    f"{EXPERTS} --dry-run --world-size 4 --global-batch-size 8": [
        (
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 2",
            "--expert-model-parallel-size 2 with --tensor-model-parallel-size 2 needs --sequence-parallel",
        ),
        (
            "--expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 is not supported: pass 1, or --tensor-model-parallel",
        ),
        (
            "--expert-model-parallel-size 3",
            "--num-experts 8 is not divisible by --expert-model-parallel-size 3",
        ),
        (
            "--expert-model-parallel-size 8",
            "is 8 ranks for all experts, which do not divide data-parallel size 4 x tensor-parallel ",
        ),
    ],
    f"{on(4)} --expert-model-parallel-size 2": [
        ("", "--expert-model-parallel-size 2 needs --num-experts: leave it out"),
    ],
    # Adapters
    LORA: [
        (
            "--lora-rank 40",
            "--lora-rank 40 is larger than the smaller side of q_proj, 32 x 32: lower it to 32 or less",
        ),
        ("--lora-target q_proj,c_attn", "--lora-target c_attn is not known"),
        ("--lora-target q_proj,linear_qkv", "linear_qkv holds q_proj"),
        ("--abft all", "--lora-rank 4 is not supported with --abft"),
    ],
    f"{EXPERTS} {LORA}": [
        (
            "--lora-dropout 0.1",
            "--lora-dropout 0.1: adapters of experts have no dropout, as in peft: pass 0, or "
            "--lora-target q_proj,k_proj,v_proj,o_proj",
        ),
        (
            "--lora-rank 20 --lora-target up_proj --moe-shared-expert-intermediate-size 16",
            "--lora-rank 20 is larger than the smaller side of up_proj, 16 x 32: lower it to 16 or less",
        ),
    ],
}

PREDICT = (
    "predict --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 1024 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --checkpoint-activations "
    "--machine a64fx --ghz 2.0 --software torch1.10 --nodes 16 --ranks-per-node 1"
)
CONTEXT_PARALLEL = (
    "predict --recipe llama-3.1-8b --global-batch-size 4 --micro-batch-size 1 --nodes 64 --ranks-per-node 1 "
    "--context-parallel-size"
)
HELD = (
    "--ranks-per-node 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3 "
    "--micro-batch-size 1"
)
RUN = f"{SMALL} --global-batch-size 8 --lr 1e-3 --mock-data"
# Words of a command -> rows of (further words, the line that refuses them)
COMMANDS = {
    "": [
        ("tran", "command tran is unknown: did you mean train?"),
        ("quux", "command quux is unknown: pass train or vocabulary or preprocess or "),
        ("--recipe demo", "command --recipe is unknown: pass train or "),
        (
            "train --num-layer 2",
            "fugaku-megatron train: unknown flag --num-layer: did you mean --num-layers?",
        ),
        ("train", "fugaku-megatron train: --num-layers, --hidden-size, "),
        ("generate --load x", "fugaku-megatron generate: nothing to continue: pass --prompt TEXT"),
        ("job plan --recipe demo", "fugaku-megatron job plan: --nodes is missing"),
        ("plam --nodes 1", "command plam is unknown: did you mean plan?"),
        ("plan --recipe 30b", "--nodes"),
        ("plan --recipe 30b --nodes 1", "no layout runs"),
        (
            "plan --recipe demo --nodes 1 --machine epyc-2core --software megatron-a100",
            "more ranks than a node",
        ),
        (
            "plan --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --nodes 2",
            "--global-batch-size is missing: pass it",
        ),
    ],
    CONTEXT_PARALLEL: [
        ("3", "1 x --pipeline-model-parallel-size 1 x --context-parallel-size 3 = 3"),
        (
            "4 --seq-length 8190",
            "--seq-length 8190 is not divisible by 8, two parts for each of --context-parallel-size 4",
        ),
        (
            "8 --tensor-model-parallel-size 8 --cp-comm-type a2a",
            "--num-attention-heads 32 is not divisible by --tensor-model-",
        ),
        ("16 --cp-comm-type ring", "--cp-comm-type ring: pass p2p, allgather, a2a or a2a+p2p"),
        (
            "16 --cp-comm-type p2p a2a",
            "--cp-comm-type has 2 values: pass one, or one for each of --num-layers 32",
        ),
    ],
    "plan --recipe 30b --nodes 384": [
        ("--against torch1.10", "--against goes with"),
        ("--train-tokens 0", "--train-tokens is 0"),
        ("--train-tokens inf", "--train-tokens is inf"),
    ],
    "plan --recipe 124m --nodes 1": [
        ("--against torch1 --explain", "--against torch1 is unknown ... did you mean torch1.7"),
        (
            "--against torch1.10 --explain --pipeline-split 12",
            "--pipeline-split 12: torch1.10 cuts",
        ),
    ],
    PREDICT: [
        ("--machine a64", "did you mean a64fx"),
        ("--machine missing.json", "pass one of"),
        ("--software torch", "--software torch is unknown"),
        ("--softwear x", "unknown flag --softwear: did you mean --software"),
        ("--ghz 3", "--ghz 3.0 is not a clock of a64fx: pass 2.0 or 2.2"),
        (
            "--tensor-model-parallel-size 3",
            "world size 16 is not divisible by --tensor-model-parallel-size 3 x "
            "--pipeline-model-parallel-size 1 = 3: pass --tensor- x --pipeline-model-parallel-size 4 x 1, 2 x 1 or 4 x 2, "
            "which fit on these nodes (plan finds the fastest), or start 15 or 18 ranks",
        ),
        (
            "--pipeline-model-parallel-size 32",
            "= 32: pass --tensor- x --pipeline-model-parallel-size 1 x 8, 1 x 4 or 2 x 8, ",
        ),
        (
            "--nodes 3",
            "data-parallel size 3 = 3: pass --tensor- x --pipeline-model-parallel-size 1 x 3, which fit on",
        ),
        ("--global-batch-size 100", "--global-batch-size 100 is not"),
        ("--nodes 0", "--nodes is 0"),
        ("--world-size 8", "--world-size 8 is not --nodes 16 x"),
        ("--hidden-size 2047", "not divisible by"),
        (
            "--pipeline-split 20,4 --pipeline-model-parallel-size 2",
            "--pipeline-split 20,4: torch1.10 cuts layers evenly",
        ),
        (
            "--pipeline-model-parallel-size 16",
            "and torch1.10 cuts layers evenly: change one of them",
        ),
        ("--ranks-per-node 100", "pass 1 to 48"),
    ],
    "tables": [
        ("--document 003", "--document 003 is unknown: pass 000 or 001 or 002 or 004 or 005"),
        ("--markdwon", "unknown flag --markdwon: did you mean --markdown?"),
    ],
    "log --ranks": [
        ("no.jsonl", "no.jsonl: cannot be read"),
        ("LOG", "line 1: not a record of --log-ranks"),
        ("LOG --csv x.csv", "--ranks writes no CSV file"),
        ("LOG LOG --png x.png", "--png x.png draws the ranks of one file, and there are 2"),
    ],
    "job plan --recipe 30b --nodes": [
        ("6000 --mode boost-2.2", "--mode normal-2.0"),
        ("512", "pass 504 or 528"),
        ("200000", "--nodes 200000: no resource group accepts this number: pass 1 to 82944"),
        (
            "384 --ranks-per-node 1 --tensor-model-parallel-size 8 "
            "--pipeline-model-parallel-size 12 --micro-batch-size 1 --recompute-granularity full --pipeline-schedule 1f1b",
            "--tensor-model-parallel-size",
        ),
        ("384 --mode fast", "--mode fast is unknown"),
        ("384 --nods 3", "did you mean"),
    ],
    "job": [
        ("plan --recipe 124m --nodes 13", "--nodes 13: no layout runs"),
        (
            f"render --recipe 124m --nodes 48 {HELD} -o nowhere/a.sh",
            "-o nowhere/a.sh: No such file or directory",
        ),
        (f"render --recipe 124m --nodes 48 {HELD} -o .", "-o .: Is a directory"),
        ("check nowhere.sh", "nowhere.sh is not a file"),
        ("sumbit x", "job: command sumbit is unknown: did you mean submit?"),
        ("quux x", "job: command quux is unknown: pass plan or render or check or submit or slurm"),
        ("render --all nowhere", "--all nowhere: pass an existing folder"),
    ],
    "job plan --recipe 124m --nodes 48": [
        ("--resource-group large", "group large accepts 385 to 12288 nodes, but --nodes is 48"),
        ("--elapse 0", "--elapse 0: small allows at most 72:00:00"),
        ("--elapse 80:00:00", "--elapse 80:00:00: small allows at most 72:00:00"),
        ("--elapse soon", "--elapse soon: write HH:MM:SS"),
        (f"{HELD} --elapse 00:05:00", "elapse=00:05:00 ends before the first iteration"),
        ("--cpu-frequency 1.8", "--cpu-frequency 1.8, but --mode normal-2.0 is 2.0 GHz"),
        ("--save here", "--save here: the script sets it: set SAVE"),
        ("--data-path text", "--data-path text: the script sets it: set DATA"),
        (
            "--tokenizer-model a.model",
            "--tokenizer-model a.model: the script sets it: set TOKENIZER",
        ),
        ("--name a}b", "--name 'a}b': "),
    ],
    "train --micro-batch-size 2": [
        (
            "--sft --pretrained-checkpoint own",
            "--num-layers, --hidden-size, --num-attention-heads, --seq-length must be passed: "
            "--pretrained-checkpoint own has those of its model in own/model.flags: add "
            "$(cat own/model.flags); pass --hidden-size, --num-attention-heads, --seq-length too",
        ),
        (
            "--load own --finetune",
            "must be passed: --load own has those of its model in own/model.flags",
        ),
        (
            "--pretrained-checkpoint hf",
            "hf holds a model of Hugging Face: convert it with fugaku-megatron convert --from-hf hf",
        ),
        ("--load trained", "must be passed, or --use-checkpoint-args, for those of the checkpoint"),
    ],
    "convert": [
        ("--load hf --to-gguf m.gguf", "--load hf: holds a model of Hugging Face ... --from-hf hf"),
        *(
            (f"--from-hf hf --to-gguf m.gguf --gguf-type {name}", message)
            for name, message in (
                ("q4_k_m", "--gguf-type q4_k_m: pass f32 or f16 or bf16 or q8_0; llama.cpp makes"),
                ("IQ4_XS", "from such a file: llama-quantize FILE NEW iq4_xs"),
            )
        ),
        *(
            (f"{source} {name} --to-gguf m.gguf", f"{message}; nothing is downloaded: ... {name} ")
            for source, name, message in (
                ("--from-hf", "Qwen/Qwen3-0.6B", "pass one that holds config.json and safetensors"),
                ("--from-hf", "gpt2", "pass one that holds config.json and safetensors"),
                ("--load", "Qwen/Qwen3-0.6B", "holds no checkpoint: there is no such directory"),
            )
        ),
        ("--from-hf ./none --save x", "holds config.json and safetensors"),
        ("--from-hf hf --outfile m.gguf", "unknown flag --outfile: did you mean --to-gguf?"),
    ],
    "generate --load hf --prompt a": [
        ("--temp 1", "unknown flag --temp: did you mean --temperature?"),
        ("--max_tokens 1", "unknown flag --max_tokens: did you mean --max-new-tokens?"),
    ],
    "preprocess --input chats.jsonl --output-prefix x": [
        (
            "--tokenizer-type NullTokenizer --vocab-size 9",
            "found only keys messages: pass --chat for chats",
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-0.6B",
            "; nothing is downloaded: ... hf download Qwen/Qwen3-0.6B --local-dir DIR writes",
        ),
        (
            "--tokenizer-type Llama2Tokenizer --tokenizer-model meta-llama/Llama-2-7b-hf",
            "pass the path of an existing model; nothing is downloaded: ",
        ),
    ],
    "supervise": [
        ("", "pass the command after --"),
        ("-- mpiexec sleep 1", "does not start pretrain_gpt.py or fugaku-megatron train"),
        (
            f"-- fugaku-megatron train {RUN} --save x",
            "--save x and --load None: pass the same folder to both",
        ),
        (
            f"-- fugaku-megatron train {RUN} --save x --load x --ckpt-step 4",
            "--ckpt-step 4: every restart",
        ),
        ("--hosts a -- x", "--hosts and --launcher belong together"),
        ("--spare-nodes 1 -- x", "--spare-nodes 1 needs --hosts"),
        ("--max-restarts -1 -- x", "--max-restarts -1: pass 0 or more"),
        (
            f"--hosts a --launcher nowhere -- pretrain_gpt.py {RUN} --save x --load x",
            "nowhere: No such file or directory: pass the launcher",
        ),
        (
            f"--hosts a,b,c --launcher x -- pretrain_gpt.py {RUN} --save x --load x",
            "--global-batch-size 8 is not divisible",
        ),
        (
            f"--hosts a,b --spare-nodes 2 --launcher x -- pretrain_gpt.py {RUN} --save x --load x",
            "--spare-nodes 2 of 2 --hosts: pass 0 to 1",
        ),
    ],
    "job render --recipe 124m --nodes": [
        ("1000000000000", "--nodes 1000000000000: no resource group accepts this number"),
        ("0", "--nodes 0: no resource group"),
        ("-12", "--nodes -12: no resource group"),
        ("12 --name ''", "--name '': use letters"),
        ("12 --name 'a b'", "--name 'a b': use letters"),
        ('12 -g "a\'b"', '--group "a\'b": use letters'),
        ("12 -g ''", "--group '': use letters"),
        ("12 --volumes '/vol0004;ls'", "--volumes '/vol0004;ls': pass volumes"),
        ("12 --volumes ''", "--volumes '': pass volumes"),
        ("12 --elapse " + "9" * 5000, "write HH:MM:SS"),
    ],
    "calibrate": [
        ("--output host.txt", "ends in .json"),
        ("--output nowhere/host.json", "is not a directory"),
    ],
}


def rows(table: dict[str, list[tuple[str, str]]]) -> list[Any]:
    return [
        pytest.param(start, words, line, id=words[:60])
        for start, mistakes in table.items()
        for words, line in mistakes
    ]


def matches(line: str, expected: str) -> bool:
    return "\n" not in line and all(part in line for part in expected.split(" ... "))


@pytest.mark.parametrize(("run", "words", "line"), rows(FLAGS))
def test_wrong_flags_of_a_run_are_refused(run, words, line):
    with pytest.raises(ValueError) as refused:
        arguments = interpret(vars(PARSER.parse_args(shlex.split(f"{run} {words}"))))
        Plan.of(arguments.run, arguments.world_size or 1)
    assert matches(str(refused.value), line)


CHOICES = [f.name for group in GROUPS.values() for f in fields(group) if "choices" in f.metadata]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, "stepwise", "is stepwise: pass ") for name in CHOICES),
        ("rampup_batch_size", (1, 2), ".*pass three"),
    ],
)
def test_keywords_have_the_rules_of_the_parser(name, value, message):
    with pytest.raises(ValueError, match=f"^{flag(name)} {message}"):
        make_run("demo", {name: value})


@pytest.mark.parametrize(("command", "words", "line"), rows(COMMANDS))
def test_wrong_words_of_a_command_end_it(command, words, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "PERIOD", float("inf"))
    files = {
        "LOG": " iteration 1/ 2 | lm loss: 1.0 |\n",
        "hf/config.json": "{}",
        "own/model.flags": "--num-layers 2\n",
        "chats.jsonl": '{"messages": []}\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert program.main(shlex.split(f"{command} {words}")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and matches(err.removesuffix("\n"), line)


def test_names_elsewhere_lead_to_flags_of_commands():
    parsers = {}
    for name in ("train", "preprocess", "convert", "generate"):
        parsers[name] = Parser()
        program.COMMANDS[name].load().add_arguments(parsers[name])
    options = {name: parser._option_string_actions.keys() for name, parser in parsers.items()}
    for row in EQUIVALENTS:
        known = [flags for flags in options.values() if f"--{row.flag}" in flags]
        assert known, row.flag
        assert any(f"--{name}" not in flags for name in row.names.split() for flags in known)


def test_a_keyword_of_another_program_is_named():
    with pytest.raises(ValueError, match="^unknown keyword learning_rate: did you mean lr?"):
        field_values({"learning_rate": 1e-3})
