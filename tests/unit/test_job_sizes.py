"""Sizes beyond any machine and names that a shell would split are refused at once."""

from pathlib import Path

import pytest

from fugaku_megatron import cli
from fugaku_megatron.jobs import check, torus

SCRIPT = (Path(__file__).resolve().parents[2] / "scripts" / "pjsub" / "run_124m.sh").read_text()


def refusal(capsys, *words):
    assert cli.main(list(words)) == 2
    error = capsys.readouterr().err.rstrip("\n")
    assert "\n" not in error and "Traceback" not in error
    return error


@pytest.mark.parametrize("node", ["999999x9x9", "999999999", "9x999999999x9:torus", "9" * 5000, "48x69x50:torus"])
def test_more_nodes_than_the_machine_has_are_a_problem_of_their_line(node):
    line = next(line for line in SCRIPT.splitlines() if "node=" in line)
    text = SCRIPT.replace(line, f'#PJM -L "node={node}"')
    problem = check.problems(text, "g", files=False)[0]
    assert SCRIPT.splitlines()[problem.line - 1] == line and f"node={node}" in problem.text
    assert "the whole machine" in problem.text or "write a number" in problem.text


@pytest.mark.parametrize("flags, named", [
    (["--nodes", "1000000000000"], "--nodes 1000000000000: no resource group accepts this number"),
    (["--nodes", "0"], "--nodes 0: no resource group"),
    (["--nodes", "-12"], "--nodes -12: no resource group"),
    (["--nodes", "12", "--name", ""], "--name '': use letters"),
    (["--nodes", "12", "--name", "a b"], "--name 'a b': use letters"),
    (["--nodes", "12", "-g", "a'b"], "--group \"a'b\": use letters"),
    (["--nodes", "12", "-g", ""], "--group '': use letters"),
    (["--nodes", "12", "--volumes", "/vol0004;ls"], "--volumes '/vol0004;ls': pass volumes"),
    (["--nodes", "12", "--volumes", ""], "--volumes '': pass volumes"),
    (["--nodes", "12", "--elapse", "9" * 5000], "write HH:MM:SS"),
])
def test_a_job_that_cannot_be_written_names_its_flag(capsys, flags, named):
    assert named in refusal(capsys, "job", "render", "--recipe", "124m", *flags)


@pytest.mark.parametrize("group", ["a'b", 'a"b', "a;b", "$(ls)", "a b"])
def test_a_group_that_a_shell_would_split_is_a_problem(group):
    assert "is not a valid name" in check.problems(SCRIPT, group, files=False)[0].text


@pytest.mark.parametrize("words", [
    ("999999x9x9", "2", "8", "6"), ("2x3x2", "999999999999", "8", "6"), ("2x3x2", "9" * 5000, "8", "6"),
    ("9" * 5000 + "x3x2", "2", "8", "6"),
    ("2x3x2", "99999", "8", "6"), ("2x3x2", "0", "8", "6"), ("²x3x2", "2", "8", "6"),
])
def test_a_rank_map_beyond_the_machine_is_refused(capsys, words):
    assert torus.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
