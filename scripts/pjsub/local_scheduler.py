"""The local scheduler emulator: pjsub, pjstat and pjdel on one machine, to try job scripts. It has no queue: a job starts at once.

    scripts/pjsub/local_pjsub --scale 2 --wait scripts/pjsub/run_124m.sh
    scripts/pjsub/local_pjstat          scripts/pjsub/local_pjdel JOBID

The options of pjsub and the #PJM directives have the same meaning as on Fugaku. The script is checked as by `fugaku-megatron job
check`; --no-check skips that. --scale N runs the script on N ranks with a tiny model, --flags adds training flags, --elapse and
--margin replace its times (seconds), --wait waits for the end of the job. The records of jobs are in .local_pjsub ($LOCAL_PJSUB).
Left out: queues, priorities, users, several nodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import local_commands

from fugaku_megatron.config.fields import check
from fugaku_megatron.jobs import limits, script

ENDED = ("EXT", "CCL", "RJT")  # states of jobs that have ended: by themselves, cancelled, rejected
GRACE = 10  # seconds between SIGTERM and SIGKILL at the elapse limit
ELAPSE_CODE, CANCEL_CODE, DEPEND_CODE = 11, 20, 28  # PJM CODE of .stats
OWN = {
    "--scale": 1,
    "--elapse": 1,
    "--margin": 1,
    "--flags": 1,
    "--wait": 0,
    "--no-check": 0,
}  # option -> number of its values


def folder() -> Path:
    """The folder of the jobs, which is created if necessary. Raises ValueError if it cannot be created."""
    path = Path(os.environ.get("LOCAL_PJSUB", ".local_pjsub")).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"LOCAL_PJSUB={path}: {error.strerror}: set LOCAL_PJSUB to a folder for jobs"
        ) from error
    return path


def read(sub: Path) -> dict:
    """The record of a sub-job."""
    return json.loads((sub / "job.json").read_text())


def write(sub: Path, **changes: object) -> dict:
    """Change the record of a sub-job, one change after another; readers see either the old or the new record."""
    with open(sub / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = {**(read(sub) if (sub / "job.json").exists() else {}), **changes}
        (sub / "job.part").write_text(json.dumps(record))
        (sub / "job.part").replace(sub / "job.json")
    return record


def _own(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The emulator's own options, which come first, and the remaining words."""
    options: dict[str, str] = {}
    while words and words[0] in OWN:
        name = words.pop(0)
        check(not OWN[name] or bool(words), f"{name} needs a value")
        options[name] = words.pop(0) if OWN[name] else "yes"
    for name, minimum in (("--scale", 1), ("--elapse", 1), ("--margin", 0)):
        value = options.get(name, "1")
        check(
            limits.is_number(value) and int(value) >= minimum,
            f"{name} is {value}: pass a number from {minimum}",
        )
    late = next((word for word in words if word in OWN), None)
    check(
        late is None or "--interact" in words,
        f"option {late} of this emulator must come before pjsub's options and the script",
    )
    return options, words


def submit(words: list[str]) -> int:
    """pjsub: check the script, write the records of its sub-jobs and start the process that runs them. Returns the exit code."""
    own, words = _own(list(words))
    options = script.Script()
    file, *arguments = script.add_options(options, words, 0) or [""]
    if "--interact" in options.switches:
        try:
            return subprocess.run(
                [file, *arguments] if file else [os.environ.get("SHELL", "bash")]
            ).returncode
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}: pass a command that can be run") from error
    check(
        Path(file).is_file(),
        f"{file or 'the script'} is not a file: local_pjsub [--scale N] [options of pjsub] FILE",
    )
    check(not arguments, f"{' '.join(arguments)!r} after {file}: pass options before the script")
    text = script.read(Path(file))
    if "--no-check" not in own and _print_mistakes(file, text, words):
        return 2
    job_script = script.parse(text)
    script.add_options(job_script, words, 0)
    subs = _enter(job_script, own, Path(file))
    log = open(subs[0] / "runner.log", "w")
    command = [sys.executable, __file__, "run", *map(str, subs)]
    runner = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(local_commands.ROOT)},
    )
    print(
        f"[INFO] PJM 0000 pjsub Job {read(subs[0])['id'].split('[')[0]} submitted. (local scheduler emulator)",
        flush=True,
    )
    if "--wait" not in own:
        return 0
    runner.wait()
    return max(read(sub)["code"] for sub in subs)


def _print_mistakes(file: str, text: str, options: list[str]) -> bool:
    """Print the mistakes of a script; returns whether there are any."""
    from fugaku_megatron.jobs import (
        check as checks,
    )  # loads numpy; the processes that run jobs do not need it

    mistakes = checks.problems(
        text, None if "-g" in options else "local", files=False, options=options
    )
    for problem in mistakes:
        print(problem.located(file), file=sys.stderr)
    return bool(mistakes)


def _number(root: Path) -> int:
    """The next job number, which is reserved by creating its folder."""
    number = 1
    while True:
        try:
            (root / str(number)).mkdir()
            return number
        except FileExistsError:
            number += 1


def _enter(job_script: script.Script, own: dict[str, str], file: Path) -> list[Path]:
    """Write the records of the sub-jobs: of an ordinary job, of one step, or of all sub-jobs of a bulk job."""
    root, sparam = (
        folder(),
        {name: v.text for name, v in job_script.settings.get("--sparam", {}).items()},
    )
    elapse_setting = job_script.get("-L", "elapse") or script.Value("3600", 0)
    elapse = int(own.get("--elapse", 0)) or limits.min_seconds(elapse_setting.text)
    name = (job_script.get("-N") or script.Value(file.name, 0)).text
    number, tags = sparam.get("jid"), [""]
    if "--bulk" in job_script.switches:
        numbers = re.fullmatch(r"(\d+)-(\d+)", next(iter(sparam), ""))
        tags = [f"[{i}]" for i in range(int(numbers[1]), int(numbers[2]) + 1)] if numbers else []
        check(
            bool(tags),
            f'--bulk with --sparam {next(iter(sparam), "")!r}: pass --sparam "FIRST-LAST", such as 0-3',
        )
    check(
        number is None or limits.is_number(number) and (root / number).is_dir(),
        f"--sparam jid={number}: there is no such job: see local_pjstat",
    )
    check(
        limits.is_number(sparam.get("sn", "0")),
        f"--sparam sn={sparam.get('sn')}: pass the number of a step",
    )
    number = number or str(_number(root))
    if "--step" in job_script.switches:
        steps = [read(sub)["step"] for sub in root.glob(f"{number}_*")]
        tags = [f"_{sparam.get('sn') or max(steps, default=-1) + 1}"]
    subs = []
    for tag in tags:
        sub = root / f"{number}{tag}"
        sub.mkdir(exist_ok=True)
        shutil.copy(file, sub / "script.sh")
        variables = [
            f"{variable}={value.text}"
            for variable, value in job_script.settings.get("-x", {}).items()
        ]
        write(
            sub,
            id=f"{number}{tag}",
            number=number,
            tag=tag,
            step=int(tag[1:]) if tag.startswith("_") else None,
            name=name,
            scale=own.get("--scale"),
            margin=own.get("--margin", "0"),
            flags=own.get("--flags", ""),
            elapse=elapse,
            state="QUE",
            variables=variables,
            depends=sparam.get("sd"),
            directory=os.getcwd(),
            statistics="-S" in job_script.switches,
            code=None,
            pjm_code=0,
            pid=None,
            nodes=(job_script.get("-L", "node") or script.Value("1", 0)).text,
            mpi=(job_script.get("--mpi", "proc") or script.Value("1", 0)).text,
        )
        subs.append(sub)
    return subs


def run(subs: list[Path]) -> None:
    """Run the sub-jobs of a job one after another; a step waits for the earlier steps."""
    for sub in subs:
        if not _ready(sub):
            write(sub, state="RJT", code=1, pjm_code=DEPEND_CODE)
        elif read(sub)["state"] == "QUE":
            _run_one(sub)


def _ready(sub: Path) -> bool:
    """Wait for earlier steps; False if the condition of --sparam sd= cancels this step."""
    record = read(sub)
    if record["step"] is None:
        return True

    def earlier() -> list[dict]:
        steps = [read(other) for other in sub.parent.glob(f"{record['number']}_*")]
        return [other for other in steps if other["step"] < record["step"]]

    while any(other["state"] not in ENDED for other in earlier()):
        time.sleep(0.1)
    condition = re.match(r"ec(!=|==)(\d+)", record["depends"] or "")
    if condition is None:
        return True
    codes = [other["code"] for other in earlier()][-1:]
    return not any((code != int(condition[2])) == (condition[1] == "!=") for code in codes)


def _environment(record: dict, sub: Path) -> dict[str, str]:
    local = sub / "localtmp"
    local.mkdir(exist_ok=True)
    local_commands.write(sub / "bin")
    names = {
        "PJM_JOBID": record["number"],
        "PJM_SUBJOBID": record["id"],
        "PJM_JOBNAME": record["name"],
        "PJM_LOCALTMP": str(local),
        "PJM_O_WORKDIR": record["directory"],
        "PJM_JOBDIR": str(sub),
        "PJM_NODE": record["nodes"].split(":")[0],
        "PJM_MPI_PROC": record["mpi"],
        "PJM_ENVIRONMENT": "BATCH",
        "PATH": f"{sub / 'bin'}:{os.environ['PATH']}",
    }
    if record["step"] is not None:
        names["PJM_STEPNUM"] = str(record["step"])
    elif record["tag"]:
        names["PJM_BULKNUM"] = record["tag"].strip("[]")
    names |= dict(pair.split("=", 1) for pair in record["variables"] if "=" in pair)
    if record["scale"]:
        names |= {
            "LOCAL_PJSUB_SCALE": record["scale"],
            "LOCAL_PJSUB_FLAGS": record["flags"],
            "MARGIN": record["margin"],
            "ELAPSE": str(record["elapse"]),
        }
        names.setdefault("ARCHIVE", str(local_commands.archive(sub)))
    return {**os.environ, **names}


def _run_one(sub: Path) -> None:
    """Run one sub-job and write its .out, .err and .stats; as on Fugaku it is ended at its elapse limit."""
    record = write(sub, state="RUN", start=time.time())
    stem = Path(record["directory"]) / f"{record['name']}.{record['id']}"
    with open(f"{stem}.out", "w") as out, open(f"{stem}.err", "w") as err:
        job = subprocess.Popen(
            ["bash", str(sub / "script.sh")],
            cwd=record["directory"],
            env=_environment(record, sub),
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if write(sub, pid=job.pid)["state"] == "CCL":  # before its process was known
            os.killpg(job.pid, signal.SIGTERM)
        late = False
        try:
            code = job.wait(record["elapse"])
        except subprocess.TimeoutExpired:
            late, code = True, _end(job)
    cancelled = read(sub)["state"] == "CCL"
    record = write(
        sub,
        state="CCL" if cancelled else "EXT",
        code=code if code >= 0 else 128 - code,
        end=time.time(),
        pjm_code=CANCEL_CODE if cancelled else ELAPSE_CODE if late else 0,
    )
    if record["statistics"]:
        Path(f"{stem}.stats").write_text(_statistics(record))
    shutil.rmtree(sub / "localtmp", ignore_errors=True)


def _end(job: subprocess.Popen) -> int:
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return job.wait()


def _statistics(record: dict) -> str:
    reasons = {
        0: "-",
        ELAPSE_CODE: "ELAPSE LIMIT EXCEEDED",
        CANCEL_CODE: "CANCELLED",
        DEPEND_CODE: "DEPENDENT STEP",
    }
    rows = {
        "JOB ID": record["id"],
        "JOB NAME": record["name"],
        "STATE": record["state"],
        "EXIT CODE": record["code"],
        "PJM CODE": record["pjm_code"],
        "REASON": reasons[record["pjm_code"]],
        "ELAPSE TIME (LIMIT)": limits.clock(record["elapse"]),
        "ELAPSE TIME (USE)": limits.clock(record["end"] - record["start"]),
        "NODE NUM (REQUIRE)": record["nodes"],
        "WRITTEN BY": "local_pjsub, an emulator",
    }
    return "".join(f"{name:<24}: {value}\n" for name, value in rows.items())


def _subs() -> list[Path]:
    return sorted(
        (p.parent for p in folder().glob("*/job.json")),
        key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)],
    )


def status() -> int:
    """pjstat."""
    print(f"{'JOB_ID':<12}{'JOB_NAME':<24}{'ST':<5}{'EC':<5}{'NODE':<32}ELAPSE_LIM")
    for record in map(read, _subs()):
        code = "-" if record["code"] is None else record["code"]
        print(
            f"{record['id']:<12}{record['name']:<24}{record['state']:<5}{code!s:<5}{record['nodes']:<32}"
            f"{limits.clock(record['elapse'])}"
        )
    return 0


def delete(words: list[str]) -> int:
    """pjdel: end a job with all its sub-jobs, or one sub-job."""
    check(bool(words), "the job to delete is missing: local_pjdel JOBID")
    for word in words:
        chosen = [sub for sub in _subs() if word in (read(sub)["id"], read(sub)["number"])]
        check(bool(chosen), f"job {word} is unknown: see local_pjstat")
        check(
            any(read(sub)["state"] not in ENDED for sub in chosen),
            f"job {word} has ended already: see local_pjstat",
        )
        for sub in chosen:
            record = read(sub)
            if record["state"] in ENDED:
                continue
            record = write(sub, state="CCL", code=record["code"] or 1, pjm_code=CANCEL_CODE)
            if record["pid"]:
                os.killpg(record["pid"], signal.SIGTERM)
        print(f"[INFO] PJM 0100 pjdel Job {word} canceled.")
    return 0


def main(program: str, words: list[str]) -> int:
    """Run the command that `program` names; a user's mistake leads to one line and exit code 2."""
    try:
        if words[:1] in (["-h"], ["--help"]):
            print(__doc__)
            return 0
        return (
            status()
            if "pjstat" in program
            else delete(words)
            if "pjdel" in program
            else submit(words)
        )
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    assert sys.argv[1] == "run", shlex.join(sys.argv)
    run([Path(word) for word in sys.argv[2:]])
