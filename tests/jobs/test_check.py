"""job check, sizes beyond any machine, node shapes and rank maps: a correct script passes, each mistake is named with its line."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.jobs import check, limits, script, torus
from fugaku_megatron.jobs.job_command import job_from_words
from fugaku_megatron.jobs.render import render, self_contained
from fugaku_megatron.jobs.torus import RankMap
from fugaku_megatron.layout_check.shrink import fewest_ranks
from fugaku_megatron.planner.system import System
from tests.checks.jobs import check_map
from tests.checks.refusals import refusals
from tests.helpers import small_run

pytestmark = pytest.mark.unit

PJSUB = Path(__file__).resolve().parents[2] / "scripts" / "pjsub"
RUN_124M = (PJSUB / "run_124m.sh").read_text()
HELD = (
    "--pipeline-schedule 1f1b --micro-batch-size 1 --recompute-granularity full --zero-stage 1 --ranks-per-node 2 "
    "--tensor-model-parallel-size 8"
)
# job -> its flags; made once, with the layout held, so that there is nothing to search
JOBS = {
    "small": "--recipe 124m --nodes 256 --name small --elapse 36:00:00 --ranks-per-node 4 --zero-stage 1 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --micro-batch-size 2 "
    "--recompute-granularity selective",
    "checked": "--recipe 124m --nodes 64 --ranks-per-node 4 --kind resume --check-layout --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --zero-stage 1 --pipeline-schedule 1f1b --micro-batch-size 1",
    "large": f"--recipe 30b --nodes 6144 --name large --pipeline-model-parallel-size 32 {HELD}",
    "top": f"--recipe 30b --nodes 12288 --name top --pipeline-model-parallel-size 6 {HELD}",
    "tensor": "--recipe 30b --nodes 384 --ranks-per-node 1 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 24 "
    "--micro-batch-size 1 --zero-stage 1 --name tensor --pipeline-schedule 1f1b",
}


def problems_of(text, group="hp1"):
    """Return what check finds without a look at files."""
    return check.problems(text, group=group, files=False)


@pytest.fixture(scope="module")
def scripts():
    return {
        name: self_contained(render(job_from_words([*shlex.split(flags), "-g", "hp000000"])))
        for name, flags in JOBS.items()
    }


@pytest.mark.parametrize("name", JOBS)
def test_what_is_rendered_passes(name, scripts):
    assert problems_of(scripts[name]) == []


def test_a_layout_is_checked_before_the_run(scripts):
    """Two replicas have the communication of all of them."""
    lines = scripts["checked"].splitlines()
    ranks = 2 * 2 * 2
    check_line = next(
        n for n, line in enumerate(lines) if line.startswith(f"check_layout {ranks} ")
    )
    assert lines[check_line + 2].startswith("START=supervise train")
    assert "\ncheck_layout " not in scripts["small"]


def test_a_job_of_another_kind_checks_no_layout():
    with pytest.raises(
        ValueError,
        match="--check-layout checks before a run of --kind train or resume, not frequency",
    ):
        job_from_words(shlex.split("--recipe 124m --nodes 16 --kind frequency --check-layout"))


@pytest.mark.parametrize("batch, replicas", [(24, 2), (9, 3)])
def test_the_run_s_batch_fits_on_the_ranks_of_the_check(batch, replicas):
    run = small_run(tensor_model_parallel_size=2, micro_batch_size=1, global_batch_size=batch)
    layout = Layout.from_run(run, 2 * 3)
    assert fewest_ranks(run, layout) == 2 * replicas


@pytest.mark.parametrize("place, change, answer", refusals("job_scripts"))
def test_a_mistake_is_refused_at_its_line(place, change, answer, scripts):
    name, _, elsewhere = place.partition(" ")
    right, wrong = change.split(" -> ")
    text = scripts[name].replace(right, wrong)
    assert text != scripts[name], f"{right} is not in the script"
    matching = [p for p in check.problems(text, files=False) if answer in p.text]
    assert len(matching) == 1, check.problems(text, files=False)
    lines = zip(scripts[name].splitlines(), text.splitlines())
    assert elsewhere or matching[0].line in [i for i, (a, b) in enumerate(lines, 1) if a != b]


def test_memory_has_the_buffers_of_the_nodes_threads(scripts, monkeypatch):
    """A rank of an A64FX node with 48 cores needs more than a rank of the fitted parameters alone."""

    def needed() -> int:
        (problem,) = problems_of(scripts["small"])
        return int(re.search(r"the fullest rank needs (\d+) MiB", problem.text)[1])

    monkeypatch.setattr(System, "limit_mib", property(lambda system: 1.0))
    of_the_machine = needed()
    monkeypatch.setattr(System, "memory", property(lambda system: system.software.fitted.memory))
    assert of_the_machine > needed() + 20


def test_the_common_part_is_checked_as_if_it_stood_on_the_line_that_reads_it():
    text = RUN_124M
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if line.startswith('. "${COMMON'))
    assert problems_of(text) == []
    outside = problems_of(text.replace("NAME=", "SAVE=/vol0009/a\nNAME="))
    assert ["SAVE=/vol0009/a is on /vol0009" in p.text for p in outside] == [True]
    unused = problems_of(text.replace("\nNODES=256\n", "\n\n"))
    assert [(p.line, p.text) for p in unused] == [
        (line, "NODES is used but not set: write NODES=256")
    ]


def test_a_folder_from_which_the_job_would_not_find_the_common_part_is_a_problem(
    tmp_path, monkeypatch
):
    text = RUN_124M
    checkout = PJSUB.parents[1]
    own = tmp_path / "fugaku_megatron.tar"
    own.touch()
    archive = ["-x", f"ARCHIVE={own}"]
    for folder in (checkout, PJSUB):
        monkeypatch.chdir(folder)
        assert check.problems(text, group="hp1", options=archive) == []
    monkeypatch.chdir(tmp_path)
    assert [p.text for p in check.problems(text, group="hp1", options=archive)] == [
        f"the job would not find fugaku_megatron/jobs/pjsub.sh in {tmp_path}: submit from the checkout, or pass -x "
        "FUGAKU_MEGATRON=/path/to/the/checkout"
    ]
    assert (
        check.problems(
            text, group="hp1", options=["-x", f"ARCHIVE={own},FUGAKU_MEGATRON={checkout}"]
        )
        == []
    )
    assert check.problems(self_contained(text), group="hp1", options=archive) == []


def test_a_group_and_variables_given_to_pjsub_are_those_that_are_checked(
    scripts, tmp_path, monkeypatch
):
    text = scripts["small"].replace("#PJM -g hp000000\n", "")
    assert ["no group" in p.text for p in check.problems(text, files=False)] == [True]
    assert problems_of(text) == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    assert any("build.sh" in p.text for p in check.problems(text, group="hp1"))
    (tmp_path / "fugaku_megatron.tar").touch()
    assert check.problems(text, group="hp1") == []
    text = scripts["small"]
    archive = tmp_path / "a.tar"
    archive.touch()
    assert check.problems(text, options=["-x", f"ARCHIVE={archive},DATA=my_text_document"]) == []
    elapse = ["-L", "elapse=00:40:00", "-x", "ELAPSE=2400,MARGIN=300"]
    assert check.problems(text, files=False, options=elapse) == []
    assert any(
        "ELAPSE=129600, but" in p.text
        for p in check.problems(text, files=False, options=elapse[:2])
    )
    outside = check.problems(text, files=False, options=["-x", "SAVE=/vol0009/a"])
    assert len(outside) == 1 and "SAVE=/vol0009/a is on /vol0009" in outside[0].text
    assert [p.line for p in check.problems(text, files=False, options=["-L", "freq=2200"])] == [0]


def test_a_spot_job_surely_has_the_first_of_two_times(scripts):
    text = (
        scripts["small"]
        .replace("rscgrp=small", "rscgrp=spot-small")
        .replace("elapse=36:00:00", "elapse=4:00:00-12:00:00")
    )
    assert check.problems(text.replace("ELAPSE:-129600", "ELAPSE:-14400"), files=False) == []
    assert any("write 14400" in p.text for p in check.problems(text, files=False))


@pytest.mark.parametrize(
    "content, answer",
    [(b"\x7fELF\xba\x00", "is not a text file"), (b"#!/bin/bash\r\necho\r\n", "CR LF")],
)
def test_a_file_that_bash_cannot_read_is_refused(content, answer, tmp_path):
    (tmp_path / "job.sh").write_bytes(content)
    with pytest.raises(ValueError, match=f"job.sh.*{answer}"):
        script.read(tmp_path / "job.sh")
    with pytest.raises(ValueError, match="gone.sh: No such file or directory: pass a job script"):
        script.read(tmp_path / "gone.sh")


def test_what_is_preloaded_must_be_there(scripts, tmp_path):
    preload = f"{tmp_path}/a.so:libm.so.6:$LOCAL/c.so"
    text = scripts["small"].replace(
        "set -euo pipefail", f"set -euo pipefail\nexport LD_PRELOAD={preload}"
    )
    (tmp_path / "fugaku_megatron.tar").touch()
    options = ["-x", f"ARCHIVE={tmp_path}/fugaku_megatron.tar,TCMALLOC={tmp_path}/b.so"]
    assert [p.text for p in check.problems(text, options=options)] == [
        f"{name} {tmp_path}/{file}.so does not exist, and the job would run without it: set another path, or remove it"
        for name, file in (("TCMALLOC", "b"), ("LD_PRELOAD", "a"))
    ]
    compared = (PJSUB / "compare_tcmalloc.sh").read_text()
    assert any("TCMALLOC is not set" in p.text for p in check.problems(compared, group="hp1"))
    assert problems_of(compared) == []


def test_options_given_to_pjsub_replace_directives():
    parsed = script.parse(
        '#PJM -L "node=12,elapse=10" -S\n#PJM --llio localtmp-size=50Gi,sio-read-cache=off\necho\n'
    )
    assert parsed.get("--llio", "sio-read-cache").text == "off" and parsed.switches == {"-S": 1}
    assert script.add_options(parsed, ["-L", "elapse=20", "--bulk", "job.sh"], 0) == ["job.sh"]
    assert parsed.get("-L", "elapse").text == "20" and parsed.get("-L", "node").text == "12"
    assert script.add_options(parsed, "-x A=1,B=9,3 job.sh -x C=1".split(), 0) == [
        "job.sh",
        "-x",
        "C=1",
    ]
    assert {name: value.text for name, value in parsed.settings["-x"].items()} == {
        "A": "1",
        "B": "9,3",
    }
    with pytest.raises(ValueError, match="line 1: 'name' does not belong to an option"):
        script.parse("#PJM -N my name\n")
    with pytest.raises(ValueError, match="^pjsub option --bogus is unknown"):
        script.add_options(parsed, ["--bogus"], 0)
    with pytest.raises(ValueError, match="line 2: .* a directive after"):
        script.parse("echo\n#PJM -S\n")
    shown = "rscgrp: small\n  node: 1 - 200\n  elapse: 00:00:01 - 48:00:00\nrscgrp: odd\n  text\n"
    groups = limits.parse_pjacl(shown)
    assert groups == {"small": limits.ResourceGroup("small", 1, 200, hours=48)}
    assert (
        limits.seconds("24:00:00") == 86400
        and limits.seconds("90") == 90
        and limits.clock(89.5) == "00:01:30"
    )


@pytest.mark.parametrize(
    "node", ["999999x9x9", "999999999", "9x999999999x9:torus", "9" * 5000, "48x69x50:torus"]
)
def test_more_nodes_than_the_machine_has_are_a_problem_of_their_line(node):
    line = next(line for line in RUN_124M.splitlines() if "node=" in line)
    text = RUN_124M.replace(line, f'#PJM -L "node={node}"')
    problem = problems_of(text)[0]
    assert RUN_124M.splitlines()[problem.line - 1] == line and f"node={node}" in problem.text
    assert "the whole machine" in problem.text or "write a number" in problem.text


@pytest.mark.parametrize("group", ["a'b", 'a"b', "a;b", "$(ls)", "a b"])
def test_a_group_that_a_shell_would_split_is_a_problem(group):
    assert "is not a valid name" in problems_of(RUN_124M, group)[0].text


@pytest.mark.parametrize(
    "words",
    [
        ("999999x9x9", "2", "8", "6"),
        ("2x3x2", "999999999999", "8", "6"),
        ("2x3x2", "9" * 5000, "8", "6"),
        ("9" * 5000 + "x3x2", "2", "8", "6"),
        ("2x3", "1", "2", "1"),
        ("2x3x2", "99999", "8", "6"),
        ("2x3x2", "0", "8", "6"),
        ("²x3x2", "2", "8", "6"),
    ],
)
def test_a_rank_map_beyond_the_machine_is_refused(capsys, words):
    assert (
        torus.main(["2x3x2", "1", "2", "1"]) == 0
        and len(capsys.readouterr().out.splitlines()) == 12
    )
    assert torus.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_shapes_are_whole_units_and_compact():
    shapes = {12: (2, 3, 2), 384: (8, 6, 8), 6144: (16, 24, 16), 12288: (16, 24, 32)}
    assert {nodes: torus.best_shape(nodes) for nodes in shapes} == shapes
    for nodes in (512, 13, 12 * 43):  # without a shape; its neighbours have one
        below, above = torus.nearest(nodes)
        assert (
            torus.best_shape(nodes) is None
            and below < nodes < above
            and torus.best_shape(below)
            and torus.best_shape(above)
        )


@pytest.mark.parametrize(
    "shape, ranks, sizes",
    [
        ((2, 3, 2), 1, (12, 1)),
        ((4, 6, 4), 4, (8, 6)),
        ((4, 6, 4), 4, (2, 3)),
        ((8, 6, 8), 1, (6, 8)),
        ((4, 3, 4), 4, (1, 1)),
        ((4, 6, 8), 2, (6, 4)),
        ((16, 24, 16), 2, (8, 32)),
        ((4, 6, 4), 4, (1, 3, 8)),
        ((4, 6, 4), 4, (2, 6, 2)),
    ],
)
def test_the_map_read_back_keeps_tensor_groups_together(shape, ranks, sizes):
    check_map(RankMap.from_layout(shape, ranks, *sizes))


def test_ranks_of_a_sequence_share_a_node_first():
    made = RankMap.from_layout((4, 6, 4), 4, 1, 2, 8)
    for first in range(0, made.grid.world_size, 8):
        assert sorted(Counter(made.nodes[first : first + 8]).values()) == [4, 4]
    assert made.statistics()["cp"][1] == 1


def test_neighbours_are_close_and_sizes_that_fit_nowhere_are_refused():
    made = RankMap.from_layout((8, 6, 8), 1, 1, 6)
    assert made.statistics()["dp"] == (1.0, 1)  # a snake through the box
    assert made.statistics()["tp"] == (0.0, 0)
    with pytest.raises(ValueError, match="pass 1, 2, 3, 4, 6, 12"):
        RankMap.from_layout((4, 6, 4), 1, 8, 1)
    with pytest.raises(ValueError, match="X and Z must be even"):
        RankMap.from_layout((3, 6, 4), 1, 1, 1)
