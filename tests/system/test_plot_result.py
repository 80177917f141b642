"""The README's picture."""

import json
import subprocess
import sys
from pathlib import Path

from tools.plot_result import bars, steps

ROOT = Path(__file__).resolve().parents[2]
STEP = {"dtype": "fp32", "micro_batch_size": 4, "ratio": 2.0, "recipe": "124m", "cpu": "a CPU", "threads": 2,
        "ours": {"tokens_per_s": 500.0},
        "baseline": {"tokens_per_s": 250.0, "name": "plain", "compiled": True, "preload": "tcmalloc"}}
PLAN = {"changes": [{"name": "native kernels", "seconds": 138.0, "note": ""}, {"name": "ranks per CMG", "seconds": 138.0,
                                                                              "note": "not taken: 139 s"},
                    {"name": "overlap", "seconds": 55.0, "note": "not in the trainer yet"}]}


def test_every_side_has_a_bar():
    assert [(name, value) for name, value, _ in bars([STEP])] == [
        ("FP32, micro-batch 4: this program (2.00 x)", 500.0), ("PyTorch, torch.compile, tcmalloc", 250.0)]
    shipped = {**STEP, "baseline": {**STEP["baseline"], "mkl": "shipped"}}
    assert bars([shipped])[1][0] == "PyTorch, torch.compile, tcmalloc, MKL as shipped"
    expected = [("published run, printed", 252.0), ("native kernels", 138.0)]
    assert [(name, value) for name, value, _ in steps(PLAN, 252.0)] == expected


def test_a_picture_and_a_mistake(tmp_path):
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    step.write_text(json.dumps(STEP))
    plan.write_text(json.dumps(PLAN))
    command = [sys.executable, "-m", "tools.plot_result", "--output", str(tmp_path / "result.png"), "--plan", str(plan), str(step)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0 and (tmp_path / "result.png").stat().st_size > 5_000
    step.write_text("no")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("plot_result: ") and done.stderr.count("\n") == 1
