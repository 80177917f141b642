"""`make release` refuses a checkout that is no release, and sums what it built; the workflow asks for identity only to publish."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

import fugaku_megatron
from tools import release

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
VERSION = fugaku_megatron.__version__


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository with a changelog of this version."""
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION}\n\n- a change\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_checkout_of_a_version_is_a_release(checkout):
    assert release.problems(checkout, f"v{VERSION}") == []


def test_what_is_not_committed_or_described_is_named(checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.0.1\n\n- a change\n")
    assert release.problems(checkout) == [
        "CHANGELOG.md is not committed: commit or remove it",
        f"CHANGELOG.md has no section {VERSION}: add `## {VERSION}` with its changes",
    ]


def test_another_tag_and_a_file_of_another_version_are_named(checkout, monkeypatch):
    monkeypatch.setattr(release, "NAMING", (ROOT / "LICENSE",))
    assert release.problems(checkout, "v9") == [
        f"LICENSE does not name version {VERSION}",
        f"the tag is v9 and fugaku_megatron.__version__ {VERSION}: make them equal",
    ]


def test_the_changelog_and_every_file_name_the_version():
    assert release.changelog_section((ROOT / "CHANGELOG.md").read_text(), VERSION)
    assert [path for path in release.NAMING if VERSION not in path.read_text()] == []


def write_wheel(path: Path, record: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.dist-info/RECORD", record)


def test_every_file_of_a_release_has_a_checksum(tmp_path):
    (tmp_path / "release").mkdir()
    with pytest.raises(SystemExit, match="lacks wheels or a source archive: run make release"):
        release.write_checksums(tmp_path)
    (tmp_path / "release" / "a.tar.gz").write_bytes(b"abc")
    wheel = tmp_path / f"fugaku_megatron-{VERSION}-py3.whl"
    write_wheel(wheel, "a.dist-info/RECORD,,")
    write_wheel(tmp_path / "fugaku_megatron-0.0.1-py3.whl", "of an earlier release")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    lines = [f"{digest}  {wheel.name}", f"{abc}  release/a.tar.gz"]
    assert release.write_checksums(tmp_path) == lines
    assert (tmp_path / "SHA256SUMS").read_text() == "\n".join(lines) + "\n"
    write_wheel(wheel, "a.dist-info/RECORD,,\nb.py,sha256=x,1")
    with pytest.raises(SystemExit, match="b.py is in RECORD and not in the wheel"):
        release.write_checksums(tmp_path)


def test_only_jobs_that_publish_may_ask_for_an_identity():
    """Each of them waits for an environment, where a person approves, and builds nothing."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    publishing = {name for name, job in jobs.items() if "id-token" in job["permissions"]}
    assert publishing == {"test-index", "publish"}
    for name in publishing:
        assert jobs[name]["environment"]["name"] and not any(
            "run" in s for s in jobs[name]["steps"]
        )
    assert jobs["publish"]["needs"] == "test-index" and jobs["test-index"]["needs"] == "build"
