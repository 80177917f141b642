"""Roots of Debian without anything of this machine, made by debootstrap once for all checkouts.

A command runs in a copy of a root (an overlay in a mount namespace of its own, so that nothing stays mounted). The copy sees this
machine's devices and processes of its own, and what pip needs here to reach an index: settings, certificates, folders of wheels.
A root with ccache shares objects with the roots before it, as checkouts on a machine do.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools import other_torch

ROOT = Path(__file__).resolve().parents[2]
CACHE = other_torch.CACHE / "roots"
PYTHON = {"bookworm": "3.11", "trixie": "3.13"}  # releases of Debian with their Python
BASE = ("python3", "python3-venv")

INSIDE = r"""
set -e
mount -t overlay overlay -o "lowerdir=$LAYERS,upperdir=$UPPER,workdir=$WORK" "$MOUNTED"
mount -t proc proc "$MOUNTED/proc"
mount --rbind /dev "$MOUNTED/dev"
for pair in $SEEN; do
    path=${pair%%=*}
    target=$MOUNTED${pair#*=}
    if [ -d "$path" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; [ -e "$target" ] || : >"$target"; fi
    mount --bind "$path" "$target"
    mount -o remount,bind,ro "$target"
done
mkdir -p "$MOUNTED/ccache"
mount --bind "$CCACHE" "$MOUNTED/ccache"
chroot --userspec="+$USER_ID:+$USER_ID" --groups= "$MOUNTED" /usr/bin/env -i "$@"
"""


@dataclass(frozen=True)
class Person:
    """Who works in a root. Without a home folder HOME is unset, and no file of the root knows the number."""

    number: int
    home: str | None
    umask: int


PEOPLE = {
    "root": Person(0, "/root", 0o022),
    "nobody": Person(65534, "/nonexistent", 0o022),
    "homeless": Person(4242, None, 0o077),
}


def missing() -> str:
    """Return the reason why this machine can make no root, or an empty text."""
    if os.geteuid() != 0:
        return "only root can make a root of Debian"
    programs = [name for name in ("debootstrap", "unshare", "chroot") if not shutil.which(name)]
    if programs:
        return f"{programs[0]} is not installed"
    return ""


def pip_settings() -> dict[str, str]:
    """Return the settings of this machine's pip as environment variables; its constraints are no part of them."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.replace("\\n", " "), re.M)
    settings = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in found}
    settings.pop("PIP_CONSTRAINT", None)
    return settings


def paths_in(settings: dict[str, str]) -> list[str]:
    """Return the files and folders that pip's settings name. An index names wheels that are beside its folder."""
    words = " ".join(settings.values()).split()
    indexes = [word.removeprefix("file://") for word in words if word.startswith("file://")]
    paths = [word for word in words if word.startswith("/")]
    paths += [os.path.dirname(index.rstrip("/")) for index in indexes]
    return [path for path in paths if os.path.exists(path)]


@dataclass
class Copy:
    """A copy of a root in `folder`, which keeps what the commands write. `layers`: the root's folders, the upper one first."""

    layers: list[Path]
    folder: Path
    wheels: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("upper", "work", "mounted"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def run(
        self, command: str, person: Person = PEOPLE["root"], within: str = "/", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell's command in the folder `within` as a person, with the variables and no others of this machine."""
        pip = pip_settings()
        seen = {path: path for path in ["/etc/resolv.conf", *paths_in(pip)]}
        for wheel in self.wheels:  # a cache below root's home is closed to others
            seen[str(wheel.parent)] = f"/wheels/{wheel.stem}"
            pip["PIP_FIND_LINKS"] = f"/wheels/{wheel.stem} {pip.get('PIP_FIND_LINKS', '')}"
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **pip,
        }
        if person.home:
            environment["HOME"] = person.home
        environment |= {"CCACHE_DIR": "/ccache", "CCACHE_UMASK": "000"}
        ccache = CACHE / "ccache"
        ccache.mkdir(parents=True, exist_ok=True)
        ccache.chmod(0o1777)
        inside = f"umask {person.umask:o} && cd {shlex.quote(within)} && {command}"
        words = [f"{name}={value}" for name, value in {**environment, **variables}.items()]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", INSIDE, "-"]
            + [*words, "sh", "-c", inside],
            env={
                "PATH": os.environ["PATH"],
                "LAYERS": ":".join(map(str, self.layers)),
                "UPPER": str(self.folder / "upper"),
                "WORK": str(self.folder / "work"),
                "MOUNTED": str(self.folder / "mounted"),
                "SEEN": " ".join(f"{path}={inside}" for path, inside in seen.items()),
                "CCACHE": str(ccache),
                "USER_ID": str(person.number),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def path(self, inside: str) -> Path:
        """Return where a file that a command wrote is outside."""
        return self.folder / "upper" / inside.lstrip("/")

    def folder_of(self, person: Person, inside: str) -> Path:
        """Make an empty folder of a person."""
        folder = self.path(inside)
        folder.mkdir(parents=True)
        os.chown(folder, person.number, person.number)
        return folder

    def add_checkout(self, person: Person, inside: str) -> None:
        """Copy the tracked files as a clone by this person has them."""
        folder = self.folder_of(person, inside)
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in tracked.stdout.split():
            if (ROOT / name).is_file():
                copy = folder / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
                copy.chmod((0o777 if os.access(ROOT / name, os.X_OK) else 0o666) & ~person.umask)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, person.number, person.number)
            if path.is_dir():
                path.chmod(0o777 & ~person.umask)


def layer(name: str, *parts: object) -> Path:
    """Return the cache's folder of a layer that is made from the parts."""
    return CACHE / f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def base(release: str) -> Path:
    """Return the root of a release with Python alone, made if the cache lacks it."""
    folder = layer(release, BASE)
    if not folder.exists():
        unfinished = CACHE / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        packages = f"--include={','.join(BASE)}"
        command = ["debootstrap", "--variant=minbase", packages, release, unfinished]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        unfinished.rename(folder)
    return folder


def with_packages(release: str, command: str) -> list[Path]:
    """Return the layers of a root in which a documented `apt-get install` was run; an empty one leaves Python alone."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        below = [base(release)]
        if not command:
            return below
        folder = layer(release, BASE, command)
        if not folder.exists():
            unfinished = CACHE / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            done = Copy(below, unfinished).run(
                f"apt-get update -q && {command} && apt-get clean", DEBIAN_FRONTEND="noninteractive"
            )
            assert done.returncode == 0, done.stdout[-2000:]
            (unfinished / "upper").rename(folder)
        return [folder, *below]
