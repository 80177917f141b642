"""The job command: it renders the committed scripts, bash and shellcheck read them, pjsub runs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.jobs import check, job_command, limits, render, script
from fugaku_megatron.jobs.job import interpret
from fugaku_megatron.jobs.limits import MARGIN
from fugaku_megatron.planner import search
from fugaku_megatron.planner.system import start_up
from tests.helpers import check_scripts
from tests.processes import ROOT, run_python, write_program

pytestmark = pytest.mark.system

FOLDER = ROOT / "scripts" / "pjsub"
COMMITTED = {name: (FOLDER / name).read_text() for name in job_command.SCRIPTS}
SEARCHED = ("run_124m.sh",)  # the search of layouts for all of them takes minutes
OF_EACH_KIND = [name for name in COMMITTED if name != "run_124m.sh"]
HELD = "--ranks-per-node 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3 --micro-batch-size 1"
LARGE = (
    "--recipe 30b --micro-batch-size 1 --ranks-per-node 2 --tensor-model-parallel-size 8 --pipeline-model-parallel-size {} "
    "--nodes {}"
)


@pytest.fixture(scope="module", autouse=True)
def each_search_once():
    """Cache plans, which several tests search for seconds."""
    known = {}
    search_all = search.search

    def once(run, system, held, **refuse):
        key = repr((run, system, sorted(held)))
        if key not in known:
            known[key] = search_all(run, system, held, **refuse)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "search", once)
        yield


def main(words):
    return program.main(["job", *words])


def hold_layout(monkeypatch, text: str) -> None:
    """Search only plans with the script's sizes; everything else is still chosen."""
    parsed = script.parse(text)
    search_all = search.search
    asked = interpret(parsed.flags)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")

    def held_search(run, system, held, **refuse):
        parallel = replace(run.parallel, **{name: getattr(asked.parallel, name) for name in names})
        batch = replace(run.batch, micro_batch_size=asked.batch.micro_batch_size)
        system = replace(system, ranks_per_node=int(parsed.variables["RANKS_PER_NODE"].text))
        return search_all(
            replace(run, parallel=parallel, batch=batch),
            system,
            held | {*names, "micro_batch_size", "ranks_per_node"},
        )

    monkeypatch.setattr(search, "search", held_search)


@pytest.mark.parametrize(
    "name, searched",
    [
        *((name, name in SEARCHED) for name in COMMITTED),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in COMMITTED
            if name not in SEARCHED
        ),
    ],
)
def test_the_committed_script_is_the_rendered_one(name, searched, monkeypatch):
    if not searched:
        hold_layout(monkeypatch, COMMITTED[name])
    assert COMMITTED[name] == job_command.rendered(name), "make rendered writes it again"
    assert os.access(FOLDER / name, os.X_OK)
    assert check.problems(COMMITTED[name], group="hp000000", files=False) == []


def test_bash_and_shellcheck_accept_the_scripts(tmp_path):
    files = [
        tmp_path / "own.sh",
        ROOT / "scripts" / "build.sh",
        *(FOLDER / name for name in OF_EACH_KIND),
    ]
    files[0].write_text(render.self_contained(COMMITTED["run_30b.sh"]))
    check_scripts(files, FOLDER.glob("*.sh"))


@pytest.mark.parametrize(
    "below, passed, found",
    [("", None, True), ("scripts/pjsub", None, True), ("docs", None, False), ("docs", ROOT, True)],
)
def test_a_script_finds_the_common_part(below, passed, found):
    """From the checkout, from scripts/pjsub and elsewhere with FUGAKU_MEGATRON; then it misses only pjsub's variables."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PJM_", "FUGAKU_MEGATRON"))
    }
    environment |= {"PWD": str(ROOT / below)} | ({"FUGAKU_MEGATRON": str(passed)} if passed else {})
    done = subprocess.run(
        ["bash", FOLDER / "run_124m.sh"],
        cwd=ROOT / below,
        env=environment,
        capture_output=True,
        text=True,
    )
    answer = (
        "submit this file: pjsub -g GROUP FILE"
        if found
        else "pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout"
    )
    assert done.returncode and answer in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "value", ["$(touch pwned)", "`touch pwned`", "a; touch pwned", "*", "a b", "'"]
)
def test_bash_reads_a_flag_as_it_was_passed(value, tmp_path):
    words = ["--wandb-exp-name", value, "--bf16"]
    text = "\n".join(render.flag_lines(words))
    command = f"{text}\nprintf '%s\\0' \"${{FLAGS[@]}}\""
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\0")[:-1] == words and not list(tmp_path.iterdir())


def test_a_rendered_script_needs_no_other_file(tmp_path, command):
    command(f"job render --recipe 124m --nodes 48 {HELD} -o {tmp_path}/own.sh")
    done = subprocess.run(
        ["bash", tmp_path / "own.sh"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "pjsub.sh was not found" not in done.stderr and "submit this file: pjsub" in done.stderr
    text = (tmp_path / "own.sh").read_text()
    assert check.problems(text, group="hp000000", files=False) == []
    reading = COMMITTED["resume.sh"]
    own, inlined = (
        [line for _, line in script.parse(part).body]
        for part in (reading, render.self_contained(reading))
    )
    assert inlined == [line for line in own if "COMMON" not in line] and len(inlined) > 90


@pytest.mark.parametrize("stages, nodes, shape", [(4, 6144, "16x24x16"), (6, 12288, "16x24x32")])
def test_plan_names_shape_layout_map_and_time(stages, nodes, shape, command):
    printed = command("job plan", LARGE.format(stages, nodes)).stdout
    for part in (
        f"{nodes} nodes as {shape} torus",
        "DP",
        "s per iteration",
        "hops between neighbours of a ring",
        "(model)",
    ):
        assert part in printed


def test_plan_says_why_and_needs_no_torch():
    """Plan with a torch that cannot be imported, as on a login node."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fugaku_megatron.cli import program\n"
        "from fugaku_megatron.planner import search\n"
        "search.PERIOD = 0.0\n"
        "sys.exit(program.main(sys.argv[1:]))"
    )
    words = (
        "--recipe 124m --nodes 48 --ranks-per-node 4 --micro-batch-size 1 --pipeline-schedule 1f1b"
    )
    few = "--tensor-model-parallel-size 1 --global-batch-size 64"
    done = run_python("-c", code, "job", "plan", *words.split(), *few.split())
    assert re.search(r"^search: \d+ of \d+ layouts with 1F1B after \d+ s", done.stderr, re.M)
    for part in (
        r"^this layout is the fastest of \d+ that run; of its .* s .model.: computation \S+, ",
        r"^not DP \d+ x TP 1 x PP \d+ with 4 ranks a node, 1f1b, .*: .* s, \+\S+% .model., of which ",
        r"^the global batch is too small for \d+ stages: with . micro-batches they wait [3-9].% of the time; "
        r"--global-batch-size 128 leaves [2-5].%, and a sample takes 0\.[5-9]\d of the time .model.",
        r"iterations and the start take \d+ d \d+ h .model., \d+ jobs in a row and [\d,]+ node hours; ",
    ):
        assert re.search(part, done.stdout, re.M), (part, done.stdout)


def data_flags(scheduler: str, **variables: str) -> list[str]:
    """Return the data flags that a scheduler's common script sets with these variables."""
    text = (ROOT / "fugaku_megatron" / "jobs" / f"{scheduler}.sh").read_text()
    choice = re.search(r'^if \[ "\$DATA" = mock \]; then$.*?^fi$', text, re.MULTILINE | re.DOTALL)[
        0
    ]
    done = subprocess.run(
        ["bash", "-euc", f"{choice}\nprintf '%s\\n' \"${{DATA_FLAGS[@]}}\""],
        capture_output=True,
        text=True,
        env={**os.environ, "LOCAL": "/local", "TOKENIZER": "", **variables},
        check=True,
    )
    return done.stdout.splitlines()


def test_a_script_names_the_tokenizer_that_was_packed():
    assert data_flags("pjsub", DATA="mock", TOKENIZER="llama") == ["--mock-data"]
    local = "--data-path /local/data/d"
    gpt2 = f"{local} --vocab-file /local/data/vocab.json --merge-file /local/data/merges.txt"
    assert data_flags("pjsub", DATA="d") == gpt2.split()
    packed = f"{local} --tokenizer-model /local/data/llama"
    assert data_flags("pjsub", DATA="d", TOKENIZER="llama") == packed.split()
    shared = "--data-path /d --tokenizer-model /llama"
    assert data_flags("slurm", DATA="/d", TOKENIZER="/llama") == shared.split()


@pytest.mark.parametrize("model", ["llama", "pieces.model", ""])
def test_the_archive_holds_the_tokenizer_and_no_weights(model, tmp_path):
    """The packing function in build.sh, without the build around it."""
    tree = tmp_path / "tree"
    python = tmp_path / "venv" / "bin" / "python"
    for folder in (tree / "data", python.parent, tmp_path / "llama"):
        folder.mkdir(parents=True)
    (tree / "app").symlink_to(ROOT)
    write_program(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    data = {"d.bin", "d.idx", "d.tokenizer.json"}
    llama = {"llama/tokenizer.json", "llama/config.json"}
    for name in (*data, *llama, "llama/model.safetensors", "pieces.model", "v.json", "m.txt"):
        (tmp_path / name).write_text(name)
    function = re.search(
        r"^pack_data\(\) \{.*?^\}$",
        (ROOT / "scripts" / "build.sh").read_text(),
        re.MULTILINE | re.DOTALL,
    )[0]
    subprocess.run(
        ["bash", "-euc", f"{function}\npack_data"],
        check=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "WORK": str(tmp_path),
            "TREE": str(tree),
            "DATA": "d",
            "MODEL": model,
            "VOCAB": "v.json",
            "MERGES": "m.txt",
        },
    )
    packed = {
        str(path.relative_to(tree / "data"))
        for path in (tree / "data").rglob("*")
        if path.is_file()
    }
    tokenizers = {
        "llama": llama,
        "": {"vocab.json", "merges.txt"},
        "pieces.model": {"pieces.model"},
    }
    assert packed == data | tokenizers[model]


def test_a_chain_counts_what_each_job_spends_on_start_and_end(capsys):
    words = f"--recipe 124m --nodes 48 {HELD} --train-iters 1000 --elapse 01:00:00"
    job = job_command.job_from_words(words.split())
    decisions = " ".join(job.why)
    training = 1000 * float(re.search(r"model: (\S+) s per iteration", decisions)[1])
    each = 3600 - MARGIN - start_up(48)
    assert f"{math.ceil(training / each)} jobs in a row" in decisions
    assert training / 3600 < 2 < training / each


@pytest.mark.parametrize("name", [name for name, mode in limits.MODES.items() if not mode.refused])
def test_every_power_state_is_said(name, command):
    text = command(f"job render --recipe 124m --nodes 12 {HELD} --mode {name}").stdout
    mode = limits.MODES[name]
    states = f"eco_state={mode.eco_state},retention_state=0,throttling_state=0"
    assert f"freq={mode.freq},{states}" in text
    assert f"--cpu-frequency {mode.ghz:.1f}" in text


@pytest.fixture
def pjsub(tmp_path, monkeypatch):
    """Installs a pjsub with an exit code and a reply for each call; returns the file of its arguments."""
    said = tmp_path / "said"
    write_program(
        tmp_path / "pjsub",
        f'#!/bin/sh\necho "$@" >> {said}\ncall=$(grep -c . {said})\n'
        f"cat {tmp_path}/reply$call\nexit $(cat {tmp_path}/code$call)\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(*replies: tuple[int, bytes]):
        for call, (code, reply) in enumerate(replies, 1):
            (tmp_path / f"reply{call}").write_bytes(reply)
            (tmp_path / f"code{call}").write_text(str(code))
        return said

    return install


QUEUED = b"[INFO] PJM 0000 pjsub Job 777_0 submitted.\n"


def test_submit_calls_pjsub_and_chains_steps(pjsub, command):
    said = pjsub(*[(0, QUEUED)] * 4)
    submit = f"job submit {FOLDER}/resume.sh --no-files"
    file = FOLDER / "resume.sh"
    command(submit, code=2)
    assert not said.exists(), "no group"
    command(submit, "-g hp1 --steps 3")
    command(submit, "-g hp1 -- -x SAVE=/vol0004/a")
    lines = said.read_text().splitlines()
    assert lines[0] == f"-g hp1 --step --sparam jnam=resume,sn=1 {file}"
    assert lines[2] == f"-g hp1 --step --sparam jid=777,sn=3,sd=ec!=0:all:2 {file}"
    assert lines[3] == f"-g hp1 -x SAVE=/vol0004/a {file}"
    refused = command(submit, "-g hp1 -- -L freq=2200", code=2).stderr
    assert f"{file}, options of pjsub: " in refused and "since April 2025" in refused
    assert "other.sh" in command(submit, "-g hp1 -- -x A=b other.sh", code=2).stderr
    assert said.read_text().splitlines() == lines and len(lines) == 4


PAGE = b"<html>503 Service Unavailable, Job 99 of the queue was submitted by nobody</html>\n"


@pytest.mark.parametrize(
    ("replies", "code", "calls", "in_queue", "left"),
    [
        ([(0, b"\xe9 " + QUEUED)] * 3, 0, 3, "steps 1 to 3 of 3 of job 777", 0),
        ([(0, PAGE)], 1, 1, "", 0),
        ([(0, b"")], 1, 1, "", 0),
        ([(7, b"\xff")], 7, 1, "", 0),
        ([(0, QUEUED), (0, PAGE)], 1, 2, "step 1 of 3 of job 777", 2),
        ([(0, QUEUED), (0, QUEUED), (90, b"no answer")], 90, 3, "steps 1 to 2 of 3 of job 777", 1),
        ([(0, QUEUED), (0, QUEUED.replace(b"777", b"99"))], 1, 2, "step 1 of 3 of job 777", 2),
        ([(0, QUEUED), (5, QUEUED)], 5, 2, "steps 1 to 2 of 3 of job 777", 1),
        ([(0, QUEUED), (0, QUEUED), (5, QUEUED)], 5, 3, "steps 1 to 3 of 3 of job 777", 0),
    ],
)
def test_a_chain_that_breaks_says_what_is_in_the_queue_and_how_it_continues(
    replies, code, calls, in_queue, left, pjsub, command
):
    said = pjsub(*replies)
    file = FOLDER / "resume.sh"
    ended = command(f"job submit {file} --no-files -g hp1 --steps 3", code=code)
    printed = ended.stdout + ended.stderr
    assert len(said.read_text().splitlines()) == calls
    assert f"in the queue: {in_queue}" in printed if in_queue else "look with pjstat" in printed
    steps = [f"jid=777,sn={step},sd=ec!=0:all:{step - 1}" for step in range(4 - left, 4)]
    commands = [f"pjsub -g hp1 --step --sparam '{step}' {file}" for step in steps]
    lines = ended.stderr.splitlines()
    assert [line for line in lines if "--sparam" in line] == [f"job submit: {c}" for c in commands]
    assert ("pjdel 777" in printed) == bool(left)


@pytest.mark.parametrize(
    ("reply", "code", "says"),
    [
        ((0, QUEUED), 0, ""),
        ((0, PAGE), 1, "whether a job is in the queue is not known"),
        ((3, b"[ERR.] PJM 0090\n"), 3, "pjsub ended with code 3 and no line"),
        ((3, QUEUED), 3, "in the queue: job 777: the same command would submit again"),
    ],
)
def test_a_single_job_is_submitted_only_if_pjsub_says_so(reply, code, says, pjsub, command):
    said = pjsub(reply)
    ended = command(f"job submit {FOLDER}/resume.sh --no-files -g hp1", code=code)
    assert says in ended.stderr and bool(says) == bool(ended.stderr)
    assert len(said.read_text().splitlines()) == 1


def test_the_script_of_the_checkout_is_the_command():
    done = run_python(ROOT / "scripts" / "submit.py", "plan", "--recipe", "30b", code=2)
    assert (
        done.stderr == "submit.py plan: --nodes is missing: pass the number of nodes of the job\n"
    )


def test_render_says_what_check_still_finds(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.delenv("FUGAKU_GROUP", raising=False)
    render_words = (
        "job render --recipe 124m --nodes 12 --ranks-per-node 4 --micro-batch-size 1 -o my.sh"
    )
    begin = "to fill in: "
    printed = command(render_words).stdout.splitlines()
    left = [line.removeprefix(begin) for line in printed if line.startswith(begin)]
    assert command("job check my.sh", code=2).stderr.splitlines() == left
    assert len(left) == 2 and "no group to charge" in left[0] and "ARCHIVE" in left[1]
    (tmp_path / "fugaku_megatron.tar").write_bytes(b"")
    assert "to fill in" not in command(render_words, "-g hp000000").stdout
    command("job check my.sh")


@pytest.mark.parametrize(
    "nodes, words",
    [(2, "--group hp000000"), (24, "--ranks-per-node 2 --mode boost-eco-2.2 --name mine")],
)
def test_the_job_that_measures_nodes_is_a_script_without_mistakes(nodes, words, tmp_path, command):
    file = tmp_path / "report.sh"
    command(f"job render --report --nodes {nodes} {words} -o {file}")
    text = file.read_text()
    assert check.problems(text, group="hp000000", files=False) == []
    ranks_per_node = 2 if "ranks" in words else 4
    assert f"proc={nodes * ranks_per_node}," in text
    assert script.parse(text).text("-L", "elapse") == render.REPORT_TIME
    assert "-m fugaku_megatron report --output" in text and "train gpt" not in text
    check_scripts([file], [])


@pytest.mark.parametrize("cluster", render.CLUSTERS.values(), ids=lambda cluster: cluster.name)
def test_the_same_for_slurm(cluster, tmp_path, command):
    file = tmp_path / "report.sbatch"
    command(f"job render --report --nodes 3 --slurm {cluster.name} -o {file}")
    text = file.read_text()
    assert f"--nodes=3\n#SBATCH --ntasks-per-node={cluster.ranks_per_node}\n" in text
    assert "@" not in text.replace('"$@"', "")
    check_scripts([file], [])


@pytest.mark.parametrize(
    "words, message",
    {
        "--report": "--report needs --nodes",
        "--slurm x86 --nodes 2": "--slurm x86 goes with --report",
        "--report --slurm x86": "--report needs --nodes",
    }.items(),
)
def test_mistakes_of_such_a_job(words, message, command):
    command("job render", words, code=2).mistake(message)


@pytest.mark.parametrize("code", [0, 8])
def test_a_job_whose_layout_differs_does_not_train(code, tmp_path):
    """The check starts 8 of the job's 256 ranks."""
    words = (
        "--recipe 124m --nodes 64 --ranks-per-node 4 --check-layout --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --zero-stage 1 --pipeline-schedule 1f1b --micro-batch-size 1 --elapse 1:00:00"
    )
    job = tmp_path / "job.sh"
    job.write_text(render.self_contained(render.render(job_command.job_from_words(words.split()))))
    log = tmp_path / "log"
    commands = tmp_path / "fugaku_megatron" / "bin"
    commands.mkdir(parents=True)
    for name in ("mpiexec", "llio_transfer", "python3"):
        write_program(
            commands / name,
            "#!/bin/bash\n"
            "words=$*\n"
            f"echo \"{name} ${{words//$'\\n'/ }}\" >> {log}\n"
            f"[[ $* != *--check-layout ]] || exit {code}\n",
        )
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PJM_JOBID": "1",
        "PJM_LOCALTMP": str(tmp_path),
    }
    ended = subprocess.run(["bash", str(job)], cwd=tmp_path, env=environment)
    assert ended.returncode == code
    lines = log.read_text().splitlines()
    (check_line,) = [line for line in lines if line.endswith("--check-layout")]
    assert check_line.startswith("mpiexec -n 8 ") and "--tensor-model-parallel-size 2" in check_line
    assert any("supervise" in line for line in lines) == (code == 0)
