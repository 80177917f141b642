"""Wrong flags and arguments that need no file to be refused: each is one line, before any work."""

import shlex
from dataclasses import fields

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import build_parser, field_values, interpret, make_run
from fugaku_megatron.cli.names_elsewhere import EQUIVALENTS
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.fields import flag
from fugaku_megatron.config.run_config import GROUPS
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.planner import search
from tests.checks.refusals import assert_refusal, refusals

pytestmark = pytest.mark.unit

PARSER = build_parser()
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--vocab-size 96 --train-iters 20"
)
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


# Flags of which these values are out of range.
RANGES = [
    *(
        (name, n, f"{name} is {n} ... : pass a number above 0")
        for name in POSITIVE
        for n in (0, -1)
    ),
    *((name, -1, f"{name} is -1 ... : pass 0 or more") for name in NOT_NEGATIVE),
    *(
        (name, n, f"{name} is {n}: pass a number from 0 to below 1")
        for name in FRACTIONS
        for n in (-0.1, 1.0)
    ),
    *((name, "inf", f"{name} is inf: pass a finite number") for name in FINITE),
]


@pytest.mark.parametrize(("run", "words", "line"), refusals("flags"))
def test_wrong_flags_of_a_run_are_refused(run, words, line):
    with pytest.raises(ValueError) as refused:
        arguments = interpret(vars(PARSER.parse_args(shlex.split(f"{run} {words}"))))
        Plan.of(arguments.run, arguments.world_size or 1)
    assert_refusal(str(refused.value), line)


@pytest.mark.parametrize(("name", "value", "line"), RANGES)
def test_values_out_of_range_are_refused(name, value, line):
    test_wrong_flags_of_a_run_are_refused(SMALL, f"{name} {value}", line)


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


@pytest.mark.parametrize(("command", "words", "line"), refusals("commands"))
def test_wrong_words_of_a_command_end_it(command, words, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "PERIOD", float("inf"))
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
    assert out == "" and err.endswith("\n")
    assert_refusal(err.removesuffix("\n"), line)


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
