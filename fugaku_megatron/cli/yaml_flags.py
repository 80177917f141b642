"""Flags from a YAML file in Megatron-LM's layout (`--yaml-cfg`), as in its
megatron/training/yaml_arguments.py.

The keys are Megatron-LM's arguments or, in two sections, fields of its TransformerConfig. Null and
empty values are ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ..config.fields import FieldValues, Refused, check, flag, shortened
from ..config.rows import ACTIVATIONS
from ..config.yaml_file import read_yaml
from .parser import Parser, nearest

SECTIONS = ("language_model", "model_parallel")

# Values of activation_func -> flags; Megatron-LM's gelu is the exact one.
ACTIVATION_FLAGS = {
    row.yaml: flag(row.flag) for row in ACTIVATIONS.values() if row.yaml and row.flag
}

# Keys that activation_func overrides, as in Megatron-LM.
OF_THE_ACTIVATION = [
    row.flag.removeprefix("no_")
    for row in ACTIVATIONS.values()
    if row.flag and (row.yaml or row.gelu)
]

# Keys named unlike their flags.
RENAMED = {
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_moe_experts": "--num-experts",
    "fp8": "--fp8-format",
}

# Keys whose value False sets a flag.
SWITCHED_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
}


# Keys without a flag here: those that only Megatron-LM's own program uses, and those that must be off.
UNUSED = """gated_linear_unit bias_activation_fusion memory_efficient_layer_norm virtual_pipeline_model_parallel_size
    perform_initialization params_dtype pipeline_dtype autocast_dtype timers tp_comm_atomic_ag tp_comm_atomic_rs
    finalize_model_grads_func grad_scale_func overlap_p2p_comm batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    no_sync_func grad_sync_func param_sync_func cpu_offloading_weights cpu_offloading_activations _cpu_offloading_context
    barrier_with_L1_time use_legacy_models bert_binary_head delay_grad_reduce delay_param_gather
    scatter_gather_tensors_in_pipeline retriever_seq_length enable_one_logger""".split()


OFF = """init_method output_layer_init_method moe_token_dropping enable_autocast variable_seq_lengths cpu_offloading
    num_microbatches_with_partial_activation_checkpoints pipeline_model_parallel_split_rank standalone_embedding_stage""".split()


OWN = ("--help", "--recipe", "--dry-run", "--world-size", "--yaml-cfg")  # of a command line alone


def complete_from_yaml(namespace: argparse.Namespace, parser: Parser) -> None:
    """Replace the command line's run flags by values from the --yaml-cfg file, with a note on ignored flags."""
    values = vars(namespace)
    names = {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if action.option_strings[-1] not in OWN
    }
    ignored = [names[dest] for dest in names if values.pop(dest, None) is not None]
    found = _load(values["yaml_cfg"], parser)
    values |= {dest: value for dest, value in found.items() if dest in names}
    note = f"--yaml-cfg {values['yaml_cfg']}: the command line's {', '.join(ignored)} are ignored, as in Megatron-LM"
    values["yaml_notes"] = (note,) if ignored else ()


def _load(path: str, parser: Parser) -> FieldValues:
    keys = dict(_flattened(path))
    decided = OF_THE_ACTIVATION if any(where.endswith("activation_func") for where in keys) else []
    known = {
        option: action
        for action in parser._actions
        for option in action.option_strings
        if option not in OWN
    }
    values: FieldValues = {}
    mistakes = []
    for where, value in keys.items():
        key = where.rpartition(".")[2]
        if key in decided or value is None or value == "":
            continue
        try:
            values |= vars(parser.parse_args(_words(key, value, known)))
        except ValueError as error:
            mistakes.append(f"--yaml-cfg {path}: {where}: {error}")
    if mistakes:
        raise Refused(mistakes)
    return values


def _flattened(path: str) -> Iterator[tuple[str, Any]]:
    top = read_yaml(path)
    seen = set()
    for name, value in top.items():
        inside = isinstance(value, Mapping)
        check(
            not inside or name in SECTIONS,
            f"--yaml-cfg {path}: {name} is a section, and the sections are "
            f"{' and '.join(SECTIONS)}: put its keys at the top",
        )
        for key, given in (value if inside else {name: value}).items():
            check(
                key not in seen,
                f"--yaml-cfg {path}: {key} stands at the top or in a section twice: leave one out",
            )
            seen.add(key)
            yield f"{name}.{key}" if inside else str(key), given


def _words(key: str, value: Any, known: Mapping[str, argparse.Action]) -> list[str]:
    if key == "activation_func":
        check(
            value in ACTIVATION_FLAGS,
            f"{value!r:.60} is not an activation: pass {', '.join(ACTIVATION_FLAGS)}",
        )
        return [ACTIVATION_FLAGS[value]]
    check(
        not isinstance(value, Mapping), "it has keys of its own, and a flag has a value: pass one"
    )
    if key in OFF:
        check(value is False, f"{value!r:.60} is not supported: pass null, or leave the key out")
    if key in (*UNUSED, *OFF):
        return []
    name = RENAMED.get(key, flag(key))
    if name not in known:
        name = f"--{key}"
    word = flag(key)[2:]
    opposites = [SWITCHED_OFF.get(key, ""), f"--no-{name[2:]}", f"--no-{word}", f"--disable-{word}"]
    off = [option for option in opposites if option in known]
    if name not in known and not off:
        remedy = ": docs/flags.md lists those there are, with - in place of _"
        raise ValueError(shortened("unknown key" + nearest(name, known, remedy)))
    if isinstance(value, bool):
        check(
            name not in known or known[name].nargs == 0,
            f"{value} is not a value of {name}: pass one, or null",
        )
        if not value:
            return off[:1]
        return [name] if name in known else []
    check(
        name in known and known[name].nargs != 0,
        f"{value!r:.60} is not a value of a switch: pass true, false or null",
    )
    if known[name].nargs is None:
        return [f"{name}={value}"]
    items = value if isinstance(value, list) else str(value).split()
    return [name, *map(str, items)]
