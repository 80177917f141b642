"""Records of a small run: one safetensors file for each number format, with whole FP32 tensors named by `Point.key`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..checkpoint.tensor_files import PlainFile, read_header, write_tensors
from ..config.fields import check
from ..text.written_files import make_folder
from .points import KINDS, Point

FORMATS = ("fp32", "int8_moments", "bf16", "fp16", "int8")


def file_of(directory: Path, number_format: str) -> Path:
    return directory / f"{number_format}.safetensors"


def check_record(directory: Path) -> None:
    """Make the directory of --record. Raise ValueError if it has a record, or cannot be made."""
    found = [each for each in FORMATS if file_of(directory, each).exists()]
    check(
        not found,
        f"--record {directory} holds {''.join(found[:1])}.safetensors: pass another directory",
    )
    try:
        make_folder(directory)
    except OSError as error:
        raise ValueError(
            f"--record {directory}: {error.strerror}: pass another directory"
        ) from None


def check_against(directory: Path) -> None:
    """Raise ValueError if the directory of --against has no record."""
    check(
        any(file_of(directory, each).is_file() for each in FORMATS),
        f"--against {directory} holds no record: pass the directory of an earlier --check-layout --record",
    )


def write_record(directory: Path, number_format: str, tensors: Mapping[Point, Tensor]) -> None:
    """Write the tensors of one number format. Raise ValueError if that fails."""
    named = {point.key: tensor.contiguous() for point, tensor in tensors.items()}
    write_tensors(file_of(directory, number_format), named)


def read_record(directory: Path, number_format: str) -> dict[Point, Tensor] | None:
    """Return the tensors of one number format in FP32, or None if the record has none.

    Raise ValueError for a file that is damaged or has other names.
    """
    path = file_of(directory, number_format)
    if not path.is_file():
        return None
    content = PlainFile(path, path.stat().st_size)
    return {
        _point(path, key): content.read_tensor(stored).float()
        for key, stored in read_header(content).items()
    }


def _point(path: Path, key: str) -> Point:
    try:
        point = Point.of(key)
    except ValueError:
        point = Point(0, "", "")
    check(
        point.kind in KINDS,
        f"{path}: {key:.80} is not ITERATION/KIND/NAME/SAMPLE with a kind of {', '.join(KINDS)}",
    )
    return point
