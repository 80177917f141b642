"""Weights of Hugging Face's models and Megatron-LM's checkpoints as checkpoints of this program, and the other way.

    fugaku-megatron convert --from-hf my_model --save start
    fugaku-megatron convert --load checkpoints --to-hf my_model
    fugaku-megatron convert --load checkpoints --to-gguf my_model.gguf --gguf-type q8_0

Formats: hugging_face.py, gguf_file.py, megatron_dist.py, megatron_legacy.py.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import CARRIED, existing_iteration
from ..cli.arguments import MODEL_FLAGS, model_flags
from ..config.fields import check, check_positive, flag, flag_words
from ..host import allocator
from ..start import environment
from .gguf.conversion import TYPES, save_gguf
from .gguf.tokenizer import INEXACT
from .hugging_face.carried_files import carry, check_carried, set_chat_template
from .hugging_face.conversion import open_hugging_face, save_hugging_face, with_architecture
from .hugging_face.peft import open_peft, save_peft
from .new_directory import check_new, new_directory
from .open_weights import open_megatron, open_weights
from .own_checkpoint import BASE_FLAG, open_own, save_own
from .weights import DTYPES, Weights, adapter_shapes, shapes

TRANSFORMER_ENGINE = "transformer_engine"
LEGACY_FORMAT = "torch"
DIST_FORMAT = "torch_dist"
COMMON_FILE = "file"
# Flags of --to-megatron that belong to one --ckpt-format, and their defaults.
OF_FORMAT: dict[str, dict[str, Any]] = {
    LEGACY_FORMAT: {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    },
    DIST_FORMAT: {"hybrid_layer_pattern": None, "common_state": COMMON_FILE},
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+)([KMG]I?B)?", re.IGNORECASE)


SOURCES: dict[str, Callable[[argparse.Namespace], Weights]] = {
    "load": lambda options: open_own(
        options.load, options.ckpt_step, options.pretrained_checkpoint, open_weights
    ),
    "from_hf": lambda options: open_hugging_face(
        options.from_hf, options.from_peft, options.drop_mtp
    ),
    "from_megatron": lambda options: open_megatron(
        options.from_megatron,
        options.ckpt_step,
        options.vocab_size,
        options.ignore_saved_arguments or (),
    ),
}

# Sources to which a flag belongs.
SOURCES_OF = {
    "ckpt_step": ("load", "from_megatron"),
    "vocab_size": ("from_megatron",),
    "ignore_saved_arguments": ("from_megatron",),
    "pretrained_checkpoint": ("load",),
}


def _save(weights: Weights, directory: Path, options: argparse.Namespace) -> None:
    save_own(weights, directory, None if options.merge else weights.adapters)
    carry(weights.carried, directory / CARRIED)
    (directory / MODEL_FLAGS).write_text(
        " ".join(_flags(weights, options)) + "\n", encoding="utf-8"
    )


def _flags(weights: Weights, options: argparse.Namespace) -> list[str]:
    words = model_flags(weights.model)
    if weights.adapters is not None and not options.merge:
        lora = weights.adapters.lora
        for f in fields(lora):
            if (value := getattr(lora, f.name)) != f.default:
                words += flag_words(f.name, value)
    return words


def _save_megatron(weights: Weights, directory: Path, options: argparse.Namespace) -> None:
    from .megatron.dist import DistFormat, save_dist
    from .megatron.legacy import LegacyFormat, save_legacy

    engine = options.transformer_impl == TRANSFORMER_ENGINE
    multiple = options.make_vocab_size_divisible_by
    if options.ckpt_format == DIST_FORMAT:
        form = DistFormat(
            engine, multiple, options.hybrid_layer_pattern, options.common_state == COMMON_FILE
        )
        save_dist(weights, directory, form)
        return
    legacy = LegacyFormat(
        engine,
        multiple,
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.expert_model_parallel_size,
    )
    save_legacy(weights, directory, legacy)


def _save_gguf(weights: Weights, directory: Path, options: argparse.Namespace) -> None:
    notes = save_gguf(
        weights,
        directory / Path(options.to_gguf).name,
        options.gguf_type,
        options.chat_template,
        options.gguf_inexact_tokenizer,
    )
    for note in notes:
        print(f"note: {note}")


DESTINATIONS: dict[str, Callable[[Weights, Path, argparse.Namespace], None]] = {
    "save": _save,
    "to_hf": lambda weights, directory, options: save_hugging_face(
        weights, directory, size(options.max_shard_size)
    ),
    "to_megatron": _save_megatron,
    "to_gguf": _save_gguf,
    "to_peft": lambda weights, directory, options: save_peft(weights, directory),
}

# Destinations that have MTP modules for some models, or for none.
ADAPTED: dict[str, Callable[[Weights], Weights]] = {
    "to_hf": with_architecture,
    "to_gguf": Weights.without_predictions,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for one source, one destination, and the written format."""
    parser.add_argument("--load", help="from: a directory of checkpoints")
    parser.add_argument(
        "--from-hf",
        metavar="DIR",
        help="from: a model's directory, with config.json and safetensors",
    )
    parser.add_argument(
        "--from-megatron",
        metavar="DIR",
        help="from: Megatron-LM's checkpoints, legacy or torch_dist",
    )
    parser.add_argument(
        "--ignore-saved-arguments",
        metavar="NAME",
        nargs="+",
        help="with --from-megatron: saved arguments of a fork of Megatron-LM that do not change the model",
    )
    parser.add_argument(
        "--save",
        help="to: weights alone as a checkpoint, for train --load DIR --finetune, or generate",
    )
    parser.add_argument(
        "--to-hf", metavar="DIR", help="to: a directory for Hugging Face's from_pretrained"
    )
    parser.add_argument(
        "--to-megatron", metavar="DIR", help="to: a checkpoint for Megatron-LM's --load"
    )
    parser.add_argument(
        "--ckpt-format",
        choices=tuple(OF_FORMAT),
        default=DIST_FORMAT,
        help="format of --to-megatron: torch_dist loads into any layout of ranks; torch is the "
        "legacy one, with a file per rank (default: %(default)s, as in Megatron-LM)",
    )
    parser.add_argument(
        "--hybrid-layer-pattern",
        metavar="PATTERN",
        help="with --ckpt-format torch_dist: write the names of a HybridModel with these layers, such "
        "as '*-*-' (default: those of a GPTModel)",
    )
    parser.add_argument(
        "--common-state",
        choices=(COMMON_FILE, "object"),
        default=COMMON_FILE,
        help="with --ckpt-format torch_dist: arguments are the file common.pt, which every "
        "megatron-core reads, or an object as megatron-core since 0.19 writes (default: %(default)s)",
    )
    parser.add_argument("--to-gguf", metavar="FILE", help="to: a file for llama.cpp")
    parser.add_argument(
        "--gguf-type",
        type=str.lower,
        metavar="TYPE",
        help=f"{', '.join(TYPES)}: format of the matrices in --to-gguf; norms and biases are f32 "
        "(default: that of the weights)",
    )
    parser.add_argument(
        INEXACT,
        action="store_true",
        help="write --to-gguf although llama.cpp makes other tokens of a few texts, which are named: "
        "texts that are not NFC, for example (default: refuse)",
    )
    parser.add_argument(
        "--to-peft",
        metavar="DIR",
        help="to: the adapters of --load as peft's from_pretrained loads them",
    )
    parser.add_argument(
        BASE_FLAG,
        metavar="DIR",
        help="the model that adapters of --load belong to (default: the directory that they name)",
    )
    parser.add_argument(
        "--from-peft",
        metavar="DIR",
        help="adapters of peft for the model of --load or another source: written by "
        "--save as adapters, and otherwise added to the weights",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add adapters to the weights, and --save a whole model; --to-hf and "
        "--to-megatron do that in any case",
    )
    parser.add_argument(
        "--drop-mtp",
        action="store_true",
        help="leave the modules out that predict further tokens, such as DeepSeek-V3's (default: they "
        "are converted if the destination has them)",
    )
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the latest)")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="format of the written weights (default: as they were read)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        help="largest safetensors file of --to-hf (default: %(default)s)",
    )
    parser.add_argument(
        "--hf-files",
        metavar="DIR",
        help="directory of the tokenizer, config.json and generation config of the "
        "model (default: those that came with it)",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja template of the tokenizer, for --save, --to-hf and "
        "--to-gguf (default: the one that came with it)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="number of tokens, where a checkpoint of Megatron-LM has only the padded number",
    )
    for name, what in (
        ("--tensor-model-parallel-size", "tensor-parallel ranks"),
        ("--pipeline-model-parallel-size", "pipeline stages"),
        ("--expert-model-parallel-size", "ranks with different experts"),
    ):
        parser.add_argument(
            name, type=int, default=1, help=f"{what} of --to-megatron (default: %(default)s)"
        )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="rows of the vocabulary that --to-megatron "
        "writes are a multiple of this x tensor-parallel size (default: %(default)s)",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=(TRANSFORMER_ENGINE, "local"),
        default=TRANSFORMER_ENGINE,
        help="layers of Megatron-LM whose names --to-megatron writes (default: %(default)s)",
    )


def size(text: str) -> int:
    """Return the bytes in "500MB", "2GiB" or a number above 0. Raise ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    number = int(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0
    check(number > 0, f"--max-shard-size is {text!r:.40}: pass a size such as 5GB or 500MB")
    return number


def _one(options: argparse.Namespace, names: Collection[str], purpose: str) -> str:
    given = [name for name in names if getattr(options, name) is not None]
    remedy = f"pass exactly one of {', '.join(map(flag, names))}"
    check(bool(given), f"no {purpose} given: {remedy}")
    check(len(given) == 1, f"more than one {purpose}, {' and '.join(map(flag, given))}: {remedy}")
    return given[0]


def check_options(options: argparse.Namespace) -> tuple[str, str]:
    """Return (source, destination). Raise ValueError for conflicting flags."""
    variable, processes = environment.processes()
    check(
        processes == 1,
        f"convert is one process, and {variable} says that {processes} were started: leave the launcher out",
    )
    source = _one(options, SOURCES, "source")
    destination = _one(options, DESTINATIONS, "destination")
    check(
        options.from_peft is None or source == "load" or options.merge or destination != "save",
        "--from-peft with --save writes "
        f"adapters of a checkpoint of this program, and the model is that of {flag(source)}: convert the model first and pass "
        "--load, or pass --merge",
    )
    check(
        destination != "to_peft" or (source == "load" and options.from_peft is None),
        "--to-peft writes the adapters of --load: leave out the others",
    )
    adapts = options.merge or options.from_peft is not None
    check(
        adapts or (source, destination) != ("load", "save"),
        "--load and --save are both this program's own checkpoints: pass "
        "--to-hf, or do not convert, because a checkpoint loads into any layout",
    )
    for name, sources in SOURCES_OF.items():
        value = getattr(options, name)
        given = " ".join(flag_words(name, tuple(value) if isinstance(value, list) else value))
        check(
            value is None or source in sources,
            f"{given} is for {' and '.join(map(flag, sources))}, not {flag(source)}: leave it out",
        )
    size(options.max_shard_size)
    check_positive(
        options,
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "make_vocab_size_divisible_by",
    )
    for form, defaults in OF_FORMAT.items():
        for name, default in defaults.items():
            value = getattr(options, name)
            check(
                value == default or options.ckpt_format == form,
                f"{flag(name)} {value} is for --ckpt-format {form}: pass both",
            )
    check(
        options.chat_template is None or destination != "to_megatron",
        "--chat-template is for --save, --to-hf and --to-gguf: leave it out",
    )
    check(
        options.gguf_type in (None, *TYPES),
        f"--gguf-type {options.gguf_type}: pass {' or '.join(TYPES)}; llama.cpp makes other types from such a file: "
        f"llama-quantize FILE NEW {options.gguf_type}",
    )
    check(
        options.gguf_type is None or destination == "to_gguf",
        f"--gguf-type {options.gguf_type} is for --to-gguf: pass both",
    )
    check(
        not options.gguf_inexact_tokenizer or destination == "to_gguf",
        f"{INEXACT} is for --to-gguf: pass both",
    )
    template = options.chat_template
    check(template is None or Path(template).is_file(), f"--chat-template {template} is not a file")
    check(
        options.hf_files is None or Path(options.hf_files).is_dir(),
        f"--hf-files {options.hf_files} is not a directory",
    )
    check_new(flag(destination), getattr(options, destination), destination == "to_gguf")
    return source, destination


def _with_peft(weights: Weights, options: argparse.Namespace) -> Weights:
    """Add the adapters from --from-peft. Raise ValueError for --merge without adapters."""
    if options.from_peft is not None:
        check(
            weights.adapters is None,
            f"--from-peft {options.from_peft}: --load {options.load} holds adapters itself: merge them "
            "first",
        )
        weights = weights.without_predictions()
        base = {
            "base": str(Path(options.load or ".").absolute()),
            "base_iteration": options.ckpt_step,
            "fingerprint": None,
        }
        if options.load is not None and options.ckpt_step is None:
            base["base_iteration"] = existing_iteration(options.load)
        weights = open_peft(options.from_peft, weights, base)
    check(
        not options.merge or weights.adapters is not None,
        "--merge adds adapters to a model, and there are none: pass --load "
        "with a checkpoint of --lora-rank, or --from-peft",
    )
    return weights


def main(options: argparse.Namespace) -> int:
    """Convert the source to the destination; print notes, parameters and the flags for train."""
    source, destination = check_options(options)
    allocator.return_large_blocks()
    weights = _with_peft(SOURCES[source](options), options).cast(DTYPES.get(options.dtype))
    if options.drop_mtp:
        weights = weights.without_predictions()
    if destination in ADAPTED:
        weights = ADAPTED[destination](weights)
    if options.hf_files is not None:
        weights = replace(weights, carried=Path(options.hf_files))
    check_carried(weights.carried)
    target = getattr(options, destination)
    with new_directory(flag(destination), target, destination == "to_gguf") as directory:
        DESTINATIONS[destination](weights, directory, options)
        if options.chat_template is not None and destination != "to_gguf":
            folder = directory / CARRIED if destination == "save" else directory
            set_chat_template(folder, Path(options.chat_template))
    alone = weights.adapters is not None and (
        destination == "to_peft" or destination == "save" and not options.merge
    )
    sizes = shapes(weights.model)
    if alone and weights.adapters:
        sizes = adapter_shapes(weights.model, weights.adapters.lora)
    parameters = sum(map(math.prod, sizes.values()))
    for note in weights.notes:
        print(f"note: {note}")
    print(f"{flag(source)} {getattr(options, source)}: {parameters:,} parameters are in {target}")
    if destination == "save":
        print(
            f"the model's flags for train are in {Path(target) / MODEL_FLAGS}: {' '.join(_flags(weights, options))}"
        )
    return 0
