"""A mistake on the command line of a command that needs no files is one line, before any work, and exit code 2."""

import shlex

import pytest

from fugaku_megatron.cli import program

PREDICT = (
    "predict --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 1024 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --checkpoint-activations "
    "--machine a64fx --ghz 2.0 --software torch1.10 --nodes 16 --ranks-per-node 1"
)
PLAN, SMALL_PLAN, TABLES, LOG, RENDER = (
    "plan --recipe 30b --nodes 384",
    "plan --recipe 124m --nodes 1",
    "tables",
    "log --ranks",
    "job render --recipe 124m --nodes",
)
SHARED = (
    "predict --recipe llama-3.1-8b --global-batch-size 4 --micro-batch-size 1 --nodes 64 --ranks-per-node 1 "
    "--context-parallel-size"
)
MISTAKES = [
    (SHARED, "3", "1 x --pipeline-model-parallel-size 1 x --context-parallel-size 3 = 3"),
    (
        SHARED,
        "4 --seq-length 8190",
        "--seq-length 8190 is not divisible by 8, two parts for each of --context-parallel-size 4",
    ),
    (
        SHARED,
        "8 --tensor-model-parallel-size 8 --cp-comm-type a2a",
        "--num-attention-heads 32 is not divisible by --tensor-model-",
    ),
    (SHARED, "16 --cp-comm-type ring", "--cp-comm-type ring: pass p2p, allgather, a2a or a2a+p2p"),
    (
        SHARED,
        "16 --cp-comm-type p2p a2a",
        "--cp-comm-type has 2 values: pass one, or one for each of --num-layers 32",
    ),
    ("plam --nodes 1", "", "command plam is unknown: did you mean plan?"),
    ("plan --recipe 30b", "", "--nodes"),
    ("plan --recipe 30b --nodes 1", "", "no layout runs"),
    (PLAN, "--against torch1.10", "--against goes with"),
    (PLAN, "--train-tokens 0", "--train-tokens is 0"),
    (PLAN, "--train-tokens inf", "--train-tokens is inf"),
    (SMALL_PLAN, "--against torch1 --explain", "--against torch1 is unknown"),
    (
        SMALL_PLAN,
        "--against torch1.10 --explain --pipeline-split 12",
        "--pipeline-split 12: torch1.10 cuts",
    ),
    (
        "plan --recipe demo --nodes 1",
        "--machine epyc-2core --software megatron-a100",
        "more ranks than a node",
    ),
    (
        "plan --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --nodes 2",
        "",
        "--global-batch-size is missing: pass it",
    ),
    (PREDICT, "--machine a64", "did you mean a64fx"),
    (PREDICT, "--software torch", "--software torch is unknown"),
    (PREDICT, "--softwear x", "unknown flag --softwear: did you mean --software"),
    (PREDICT, "--ghz 3", "--ghz 3.0 is not a clock"),
    (
        PREDICT,
        "--tensor-model-parallel-size 3",
        "world size 16 is not divisible by --tensor-model-parallel-size 3 x --pipeline-"
        "model-parallel-size 1 = 3: pass --tensor- x --pipeline-model-parallel-size 4 x 1, 2 x 1 or 4 x 2, which fit on these nodes "
        "(plan finds the fastest), or start 15 or 18 ranks",
    ),
    (
        PREDICT,
        "--pipeline-model-parallel-size 32",
        "= 32: pass --tensor- x --pipeline-model-parallel-size 1 x 8, 1 x 4 or 2 x 8, ",
    ),
    (
        PREDICT,
        "--nodes 3",
        "data-parallel size 3 = 3: pass --tensor- x --pipeline-model-parallel-size 1 x 3, which fit on",
    ),
    (PREDICT, "--global-batch-size 100", "--global-batch-size 100 is not"),
    (PREDICT, "--nodes 0", "--nodes is 0"),
    (PREDICT, "--world-size 8", "--world-size 8 is not --nodes 16 x"),
    (PREDICT, "--hidden-size 2047", "not divisible by"),
    (
        PREDICT,
        "--pipeline-split 20,4 --pipeline-model-parallel-size 2",
        "--pipeline-split 20,4: torch1.10 cuts layers evenly",
    ),
    (
        PREDICT,
        "--pipeline-model-parallel-size 16",
        "and torch1.10 cuts layers evenly: change one of them",
    ),
    (PREDICT, "--ranks-per-node 100", "pass 1 to 48"),
    (TABLES, "--document 003", "--document 003 is unknown: pass 000 or 001 or 002 or 004 or 005"),
    (TABLES, "--markdwon", "unknown flag --markdwon: did you mean --markdown?"),
    (LOG, "no.jsonl", "no.jsonl: cannot be read"),
    (LOG, "LOG", "line 1: not a record of --log-ranks"),
    (LOG, "LOG --csv x.csv", "--ranks writes no CSV file"),
    (LOG, "LOG LOG --png x.png", "--png x.png draws the ranks of one file, and there are 2"),
    (RENDER, "1000000000000", "--nodes 1000000000000: no resource group accepts this number"),
    (RENDER, "0", "--nodes 0: no resource group"),
    (RENDER, "-12", "--nodes -12: no resource group"),
    (RENDER, "12 --name ''", "--name '': use letters"),
    (RENDER, "12 --name 'a b'", "--name 'a b': use letters"),
    (RENDER, '12 -g "a\'b"', '--group "a\'b": use letters'),
    (RENDER, "12 -g ''", "--group '': use letters"),
    (RENDER, "12 --volumes '/vol0004;ls'", "--volumes '/vol0004;ls': pass volumes"),
    (RENDER, "12 --volumes ''", "--volumes '': pass volumes"),
    (RENDER, "12 --elapse " + "9" * 5000, "write HH:MM:SS"),
    ("calibrate", "--output host.txt", "ends in .json"),
    ("calibrate", "--output nowhere/host.json", "is not a directory"),
]


@pytest.mark.parametrize(("command", "mistake", "message"), MISTAKES, ids=lambda value: value[:40])
def test_a_mistake_is_one_line(command, mistake, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOG").write_text(" iteration 1/ 2 | lm loss: 1.0 |\n")
    assert program.main(shlex.split(f"{command} {mistake}")) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1 and "Traceback" not in err
