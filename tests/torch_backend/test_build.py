"""The dispatch library for the installed torch: its place, and the reasons why there is none."""

import stat

import pytest
import torch

from fugaku_megatron.torch_backend import build

pytestmark = pytest.mark.unit


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Let build.py compile a source of one line into an empty folder."""
    folder = tmp_path / "package"
    folder.mkdir()
    source = tmp_path / "small.cc"
    source.write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "LIBRARIES", [])
    return folder


def test_it_is_compiled_once_next_to_the_source(empty, monkeypatch):
    path = build.library()
    assert path.parent == empty
    assert [each.name for each in empty.iterdir()] == [build.file_name()]
    monkeypatch.setenv("CXX", "no-compiler")
    assert build.library() == path


def test_a_folder_of_others_sends_it_to_the_users_cache(empty, monkeypatch, tmp_path):
    monkeypatch.setattr(build.os, "access", lambda *arguments: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = build.library()
    assert path.parent == tmp_path / "cache" / "fugaku_megatron"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    path.unlink()
    with pytest.raises(ImportError, match="only this user"):
        build.library()


def test_a_user_without_a_home_folder_is_told_the_variable(empty, monkeypatch):
    """A number that no file knows, as containers have: Path.home() raises RuntimeError."""
    monkeypatch.setattr(build.os, "access", lambda *arguments: False)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.os, "getuid", lambda: 987654321)
    with pytest.raises(ImportError, match="home directory.*name a folder by XDG_CACHE_HOME"):
        build.library()


def test_source_torch_and_python_name_it(empty, monkeypatch):
    names = {build.file_name()}
    build.SOURCE.write_text("int two() { return 2; }\n")
    names.add(build.file_name())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.add(build.file_name())
    assert len(names) == 3


def test_a_build_deletes_the_libraries_of_older_sources(empty, monkeypatch):
    """Libraries for another torch stay: checkouts serve several environments."""
    build.library()
    build.SOURCE.write_text("int two() { return 2; }\n")
    kept = {build.library()}
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    kept.add(build.library())
    assert set(empty.iterdir()) == kept


def test_two_folders_make_the_same_bytes(empty, monkeypatch, tmp_path):
    """Source and torch are elsewhere, and torch is reached by a link; headers and source say where they are."""
    libraries = []
    for place in ("one", "another/deeper"):
        include = tmp_path / place / "site" / "torch" / "include"
        include.mkdir(parents=True)
        (include / "named.h").write_text("inline const char* header() { return __FILE__; }\n")
        source = tmp_path / place / "small.cc"
        source.write_text(
            "#include <named.h>\n"
            'extern "C" const char* one() { return header(); }\n'
            'extern "C" const char* two() { return __FILE__; }\n'
        )
        link = tmp_path / place / "a_longer_name_than_that_of_the_folder"
        link.symlink_to(include.parents[1])
        monkeypatch.setattr(build, "SOURCE", source)
        monkeypatch.setattr(torch, "__file__", str(link / "torch" / "__init__.py"))
        path = build.library()
        libraries.append(path.read_bytes())
        path.unlink()
    assert libraries[0] == libraries[1]
    assert b"torch/include/named.h" in libraries[0] and b"torch_backend/small.cc" in libraries[0]
    assert str(tmp_path).encode() not in libraries[0]


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"CXX": "no-compiler"}, "no-compiler is missing: install g++"),
        ({"CXX": "false"}, "false cannot compile"),
        ({"CXX": "g++ -DBAD"}, "error"),
    ],
)
def test_no_compiler_is_one_line(empty, monkeypatch, variables, words):
    build.SOURCE.write_text("#ifdef BAD\n#error no\n#endif\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ImportError, match=words.replace("+", r"\+")) as raised:
        build.library()
    assert "\n" not in str(raised.value)
    assert not list(empty.iterdir())


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(ImportError, match="torch 2.8.0.cpu is too old.*install torch 2.9"):
        build.library()
