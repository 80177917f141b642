"""Compares a wheel with its own list of files, and an archive of a release with another build of the same sources.

python -m tools.verify_wheel WHEEL                every file is in RECORD with its digest, and nothing else
python -m tools.verify_wheel WHEEL REBUILT        also: both have the same bytes; the first file that differs is named
python -m tools.verify_wheel ARCHIVE.tar.gz REBUILT
"""

from __future__ import annotations

import base64
import csv
import hashlib
import sys
import tarfile
import zipfile
from itertools import zip_longest
from pathlib import Path


def members(archive: Path) -> list[tuple[str, str, bytes]]:
    """Return (name, date and permissions, content) of every file of a wheel or a .tar.gz, in its order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [
                (row.filename, f"{row.date_time} {row.external_attr:o}", wheel.read(row))
                for row in wheel.infolist()
            ]
    with tarfile.open(archive) as packed:
        return [
            (
                row.name,
                f"{row.mtime} {row.mode:o} {row.uid} {row.gid} {row.uname}",
                packed.extractfile(row).read() if row.isfile() else b"",
            )
            for row in packed
        ]


def record_problem(wheel: Path) -> str:
    """Return what RECORD and the files of a wheel disagree about first; empty if nothing."""
    files = members(wheel)
    names = [name for name, _, _ in files]
    (record,) = (content for name, _, content in files if name.endswith(".dist-info/RECORD"))
    listed = {name: digest for name, digest, _ in csv.reader(record.decode().splitlines())}
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        return f"{repeated[0]} is there twice"
    if missing := sorted(listed.keys() - names):
        return f"{missing[0]} is in RECORD and not in the wheel"
    for name, _, content in files:
        if name not in listed:
            return f"{name} is not in RECORD"
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if listed[name] != f"sha256={digest}" and not name.endswith(".dist-info/RECORD"):
            return f"{name} has another content than RECORD says"
    return ""


def first_difference(archive: Path, other: Path) -> str:
    """Return the first file in which two archives differ, and in what; empty if they have the same bytes."""
    for one, two in zip_longest(members(archive), members(other)):
        if one is None or two is None or one[0] != two[0]:
            names = [each[0] if each else "the end" for each in (one, two)]
            return f"{names[0]} in {archive}, where {other} has {names[1]}"
        if one[1] != two[1]:
            return f"{one[0]}: date, permissions or owner {one[1]} and {two[1]}"
        if one[2] != two[2]:
            return f"{one[0]}: the contents differ"
    return "" if archive.read_bytes() == other.read_bytes() else "the compression differs"


def main(arguments: list[str]) -> str:
    """Return the first problem of the archives; empty if there is none."""
    if len(arguments) not in (1, 2):
        return "usage: python -m tools.verify_wheel ARCHIVE [REBUILT]"
    archives = [Path(each) for each in arguments]
    for archive in archives:
        if not archive.exists():
            return f"{archive} does not exist"
        if archive.suffix == ".whl" and (problem := record_problem(archive)):
            return f"{archive}: {problem}"
    return first_difference(*archives) if len(archives) == 2 else ""


if __name__ == "__main__":
    if found := main(sys.argv[1:]):
        sys.exit(f"verify_wheel: {found}")
    print("all files OK")
