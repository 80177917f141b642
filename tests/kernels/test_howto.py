"""docs/kernels-howto.md quotes real files: its code stands in them, and what it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kernels-howto.md").read_text()
SECTION = PAGE[PAGE.index("## Adding a kernel") : PAGE.index("## Tuning for a new machine")]
FOLDERS = ["", "kernels_sve", "fugaku_megatron"]


def quotations():
    """(file, code) of every fenced block, the file being the last one with a folder that is named before it."""
    for match in re.finditer(r"```(?:c\+\+|python)\n(.*?)```", SECTION, re.DOTALL):
        yield re.findall(r"`((?:kernels_sve|tests|tools|benchmarks)/[\w/]+\.\w+)`", SECTION[: match.start()])[-1], match[1]


@pytest.mark.parametrize(("file", "code"), list(quotations()))
def test_a_quotation_stands_in_its_file(file, code):
    assert code in (ROOT / file).read_text(), file


def test_every_step_is_quoted():
    assert {Path(file).name for file, _ in quotations()} == {"kernels.inc", "reference_rowwise.cc", "rowwise.h", "bind_rowwise.cc",
                                                             "test_rowwise.py", "ops_rows.cc", "rowwise.py"}


def test_files_and_tuning_values_that_are_named_exist():
    names = set(re.findall(r"`([\w/]+\.(?:h|cc|inc|py|md))`", PAGE))
    assert [name for name in sorted(names) if not any((ROOT / folder / name).exists() for folder in FOLDERS)] == []
    tuning = (ROOT / "kernels_sve" / "tuning.h").read_text()
    values = set(re.findall(r"`((?:GEMM|ROW|KEY|ATTENTION)_[A-Z_]+)`", PAGE))
    assert values and [value for value in sorted(values) if value not in tuning] == []
