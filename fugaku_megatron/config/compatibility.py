"""Flags of Megatron-LM and its forks that are no fields of `config`: what each means here, or why it is refused.

Scripts written for them start unchanged, unless they ask for something that would change the model or be lost.
"""

from __future__ import annotations

NO_FP8 = "these CPUs have no FP8 arithmetic: leave it out, the short formats are --bf16 and --fp16"
TENSORBOARD = "TensorBoard gets every figure of the log line"
TIMERS = "no timers are printed: --profile and --log-ranks say where the time goes"
GARBAGE = "ignored: Python's own garbage collection is left alone"

# flag -> (number of values as argparse has it, what it means here)
COMPATIBILITY_FLAGS: dict[str, tuple[int | str, str]] = {
    "--no-cuda": (0, "there is no CUDA here: everything runs on the CPU"),
    "--distributed-backend": (1, "communication is always MPI"),
    "--DDP-impl": (1, "a bucket's gradients always live in one flat buffer, which is what 'local' does"),
    "--cpu-optimizer": (0, "the optimizer always runs on the CPU"),
    "--cpu-torch-adam": (0, "AdamW is the built-in kernel, with torch.optim.AdamW's arithmetic"),
    "--use-cpu-initialization": (0, "weights are always initialised on the CPU, equal for every parallel layout"),
    "--test-data-path": ("+", "no loss is computed on a test split here"),
    "--use-cached-dataset": (0, "an index of samples that is in a file, of --data-cache-path or next to the data, is always used"),
    "--data-impl": (1, "the data format is always .bin/.idx through mmap"),
    "--dataloader-type": (1, "samples are read in their one order ('single')"),
    "--num-workers": (1, "one thread reads ahead"),
    "--optimizer": (1, "AdamW is the one optimizer"),
    "--main-params-dtype": (1, "master weights are always in FP32"),
    "--main-grads-dtype": (1, "gradients are always accumulated in FP32"),
    "--use-flash-attn": (0, "attention is always one kernel that keeps no scores"),
    "--attention-softmax-in-fp32": (0, "softmax is always in FP32"),
    "--no-query-key-layer-scaling": (0, "scores are never scaled by the layer's number"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are always accumulated and summed in FP32"),
    "--no-load-rng": (0, "the random state is the seed and the position in the data"),
    "--no-save-rng": (0, "the random state is the seed and the position in the data"),
    "--no-masked-softmax-fusion": (0, "attention has no separate masked softmax"),
    "--no-bias-dropout-fusion": (0, "which kernels are fused is not a flag here"),
    "--no-gradient-accumulation-fusion": (0, "weight gradients are always accumulated straight into the FP32 buffer"),
    "--no-async-tensor-model-parallel-allreduce": (0, "ignored"),
    "--local_rank": (1, "MPI sets the rank"),
    "--local-rank": (1, "MPI sets the rank"),
    "--distributed-timeout-minutes": (1, "ignored: MPI has no time-out"),
    "--log-throughput": (0, "TFLOPs are in every log line"),
    "--bias-gelu-fusion": (0, "which kernels are fused is not a flag here"),
    "--no-bias-swiglu-fusion": (0, "which kernels are fused is not a flag here"),
    "--no-rope-fusion": (0, "which kernels are fused is not a flag here"),
    "--no-persist-layer-norm": (0, "which kernels are fused is not a flag here"),
    "--transformer-impl": (1, "there is one implementation of the layers"),
    "--use-mcore-models": (0, "there is one implementation of the model"),
    "--attention-backend": (1, "attention is always one kernel that keeps no scores"),
    "--context-parallel-size": (1, "every rank of a stage has the whole sequence"),
    "--exit-signal-handler": (0, "SIGTERM, SIGINT and SIGUSR1 always save and leave"),
    "--timing-log-level": (1, TIMERS),
    "--timing-log-option": (1, TIMERS),
    "--log-timers-to-tensorboard": (0, TIMERS),
    "--log-batch-size-to-tensorboard": (0, TENSORBOARD),
    "--log-validation-ppl-to-tensorboard": (0, TENSORBOARD),
    "--log-learning-rate-to-tensorboard": (0, TENSORBOARD),
    "--log-loss-scale-to-tensorboard": (0, TENSORBOARD),
    "--log-memory-to-tensorboard": (0, TENSORBOARD),
    "--log-world-size-to-tensorboard": (0, TENSORBOARD),
    "--no-log-learning-rate-to-tensorboard": (0, TENSORBOARD),
    "--no-log-loss-scale-to-tensorboard": (0, TENSORBOARD),
    "--log-optimizer-states-to-tensorboard": (0, TENSORBOARD),
    "--tensorboard-queue-size": (1, "ignored"),
    "--tensorboard-log-interval": (1, "every iteration is written"),
    "--cross-entropy-loss-fusion": (0, "the loss is always one kernel"),
    "--calculate-per-token-loss": (0, "every token counts, so the mean over micro-batches is the mean over tokens"),
    "--manual-gc": (0, GARBAGE),
    "--manual-gc-interval": (1, GARBAGE),
    "--empty-unused-memory-level": (1, "ignored: there is no GPU memory to release"),
    "--no-create-attention-mask-in-dataloader": (0, "attention is causal by itself, and no mask is made"),
    "--no-mmap-bin-files": (0, "files are always mapped"),
    "--ckpt-format": (1, "checkpoints have one format, which loads into any layout"),
}
COMPATIBILITY_CHOICES = {"--optimizer": ("adam",)}  # others are another run

# flag -> (the values that change nothing here, why others are refused)
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "--main-params-dtype": (("fp32",), "master weights are in FP32: pass fp32"),
    "--main-grads-dtype": (("fp32",), "gradients are accumulated in FP32: pass fp32; --grad-reduce-in-bf16 sends half the bytes"),
    "--context-parallel-size": (("1",), "context parallelism is not built: pass 1, and --sequence-parallel for long sequences"),
    "--dataloader-type": (("single",), "it draws another order, epoch by epoch, from torch's generator; here a sample's place is a "
                                       "function of the seed: pass single"),
}

# flag -> (number of values, why it is refused)
REFUSED_FLAGS: dict[str, tuple[int, str]] = {
    "--no-bias-gelu-fusion": (0, "it asks Megatron-LM for the exact GELU, and the blocks compute its tanh form, as the fused "
                                 "kernel there: leave it out"),
    "--squared-relu": (0, "the MLP has GELU, or --swiglu"),
    "--num-experts": (1, "mixtures of experts are not built"),
    "--multi-latent-attention": (0, "keys and values are whole: --group-query-attention makes them fewer"),
    "--window-attn-skip-freq": (1, "--window-size holds for all layers"),
    "--no-position-embedding": (0, "pass --position-embedding-type rope or none"),
    "--rotary-seq-len-interpolation-factor": (1, "rope is stretched by --use-rope-scaling only, as Llama 3.1 does it"),
    "--apply-layernorm-1p": (0, "weights of norms begin at 1, not at 0: leave it out"),
    "--decoupled-lr": (1, "all weights have one learning rate: leave it out"),
    "--decoupled-min-lr": (1, "all weights have one learning rate: leave it out"),
    "--fp8-format": (1, NO_FP8),
    "--fp8-amax-history-len": (1, NO_FP8),
    "--fp8-amax-compute-algo": (1, NO_FP8),
    "--fp8-param-gather": (0, NO_FP8),
    "--tiktoken-pattern": (1, "tiktoken's files are not read: pass --tokenizer-type HuggingFaceTokenizer and the model's folder"),
    "--reset-position-ids": (0, "positions count from the beginning of a sample, whatever documents are in it"),
    "--reset-attention-mask": (0, "attention reaches back to the beginning of a sample, whatever documents are in it"),
    "--eod-mask-loss": (0, "the loss counts every token, those that end a document as well"),
}
