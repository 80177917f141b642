"""tools/arm_env.py: pins, stamps, and a reason in one line when there can be no ARM environment."""

import subprocess

import pytest

from tests.arm import builds

arm_env = builds.arm_env


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A machine with the host packages and an empty .arm/."""
    monkeypatch.setattr(arm_env, "ARM", tmp_path / ".arm")
    monkeypatch.setattr(arm_env, "missing", lambda packages: [])
    monkeypatch.setattr(arm_env.sys, "argv", ["arm_env.py"])
    return tmp_path / ".arm"


def test_torch_is_the_one_for_aarch64():
    assert "torch==2.9.1" in arm_env.pinned()
    assert all("==" in wheel for wheel in [*arm_env.pinned(), *arm_env.THEIRS])


@pytest.mark.parametrize(
    ("apt", "user", "reason"),
    [
        (None, 0, "no apt here, and the machine lacks qemu-user-static"),
        (
            "/usr/bin/apt-get",
            1000,
            "not root, and the machine lacks qemu-user-static: apt-get install qemu-user-static",
        ),
    ],
)
def test_reason_is_one_line_and_kept_for_the_tests(empty, monkeypatch, capsys, apt, user, reason):
    monkeypatch.setattr(
        arm_env,
        "missing",
        lambda packages: ["qemu-user-static"] if packages is arm_env.HOST_PACKAGES else [],
    )
    monkeypatch.setattr(arm_env.shutil, "which", lambda name: apt)
    monkeypatch.setattr(arm_env.os, "geteuid", lambda: user)
    assert arm_env.main() == 3
    assert capsys.readouterr().out.splitlines()[-1] == f"arm-env: no ARM environment here: {reason}"
    assert arm_env.why_not() == reason and not arm_env.ready()


def test_no_network_is_a_reason(empty, monkeypatch, capsys):
    done = subprocess.CompletedProcess(
        [], 100, "", "W: weather\nE: Unable to fetch some archives\n"
    )
    monkeypatch.setattr(arm_env.subprocess, "run", lambda *args, **options: done)
    assert arm_env.main() == 3
    assert capsys.readouterr().out.endswith(
        "apt-get update for arm64 failed: E: Unable to fetch some archives\n"
    )


def test_each_part_is_made_once_and_again_after_a_change(empty, monkeypatch):
    made = []

    def parts(site_recipe):
        return {
            name: (recipe, lambda path: (made.append(path.name), path.mkdir()))
            for name, recipe in (("root", "a"), ("site", site_recipe))
        }

    for recipe in ("b", "b", "c"):
        monkeypatch.setattr(arm_env, "parts", lambda recipe=recipe: parts(recipe))
        assert arm_env.main() == 0 and arm_env.ready()
    assert made == ["root", "site", "site"]


def test_a_part_that_failed_is_not_taken_for_made(empty, monkeypatch):
    def fails(path):
        path.mkdir()
        raise arm_env.Unavailable("cable cut")

    monkeypatch.setattr(arm_env, "parts", lambda: {"root": ("a", fails)})
    assert arm_env.main() == 3 and not arm_env.ready()
    assert arm_env.why_not() == "cable cut"
