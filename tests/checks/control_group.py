"""Control groups that a test makes."""

from pathlib import Path

from fugaku_megatron.host import cgroup


def make_control_group(monkeypatch, root: Path, line: str, folder: str) -> None:
    """Make the control group of this process: a line of /proc/self/cgroup, and a folder in place of /sys/fs/cgroup."""
    monkeypatch.setattr(cgroup, "PROC", root / "cgroup")
    monkeypatch.setattr(cgroup, "ROOT", root)
    (root / "cgroup").write_text(line + "\n")
    (root / folder).mkdir(parents=True)
