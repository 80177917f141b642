"""A PyTorch program with the backend on the emulated A64FX: operators are served, and the losses are PyTorch's."""

import json
import os
import subprocess

import pytest

from tests.arm import builds

pytestmark = [pytest.mark.arm, builds.needs_python]

PROGRAM = builds.ROOT / "tests" / "arm" / "train_with_pytorch.py"
SERVED = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "addmm",
    "embedding_dense_backward",
    "gelu",
    "mm",
    "native_layer_norm",
    "native_layer_norm_backward",
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    output = tmp_path_factory.mktemp("arm") / "result.json"
    done = builds.run_or_skip(
        [str(builds.PYTHON), str(PROGRAM), str(output)],
        600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(builds.ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(output.read_text())


def test_the_losses_are_pytorchs(result):
    assert (result["machine"], result["target"]) == ("aarch64", "sve512")
    first, last = result["torch"]
    assert last < first, "the model learns nothing, so equal losses say nothing"
    assert result["native"] == pytest.approx(result["torch"], rel=1e-5)


def test_the_kernels_serve_its_operators(result):
    assert SERVED <= {name for name, count in result["served"].items() if count}
