"""Files that commands write: refused before the work with one line, and so is what the system refuses in the end."""

from __future__ import annotations

import os

import pytest

from fugaku_megatron import cli
from fugaku_megatron.config.outputs import check_file, writing
from fugaku_megatron.reproduction import fit
from tests.time_limit import time_limit

PLAN = ["plan", "--recipe", "demo", "--nodes", "1", "--ranks-per-node", "1"]


@pytest.mark.parametrize("command, flag", [(PLAN, "--png"), ([*PLAN, "--json"], "--png"), (["fit"], "--output"),
                                           (["tables"], "--csv"), (["tables"], "--png"), (["calibrate"], "--output")])
@pytest.mark.parametrize("place, message", [("{here}/none/a.json", "{here}/none is not a directory"),
                                            ("{here}/a.json", "{here}/a.json is a directory"),
                                            ("{here}/" + "n" * 300, "File name too long: pass another file")])
def test_a_place_that_takes_no_file_is_one_line_before_the_work(command, flag, place, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.json").mkdir()
    monkeypatch.setattr(fit, "make_report", lambda group: pytest.fail("the fit began"))
    assert cli.main([*command, flag, place.format(here=tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"{flag} {place.format(here=tmp_path)}" in err and message.format(here=tmp_path) in err
    assert err.count("\n") == 1


def test_no_name_is_no_file():
    with pytest.raises(ValueError, match="--csv '' is not a name: pass a file"):
        check_file("--csv", "")
    check_file("--csv", None)


def test_a_fifo_is_refused_without_waiting_for_a_reader(tmp_path, capsys):
    os.mkfifo(tmp_path / "a.csv")
    with time_limit(), pytest.raises(ValueError, match="--csv .*a.csv is a FIFO, which would wait for a reader: pass a file"):
        check_file("--csv", tmp_path / "a.csv")
    with time_limit():
        os.mkfifo(tmp_path / "a.sh")
        assert cli.main(["job", "render", "--recipe", "124m", "--nodes", "12", "--ranks-per-node", "4", "--micro-batch-size",
                         "1", "-o", str(tmp_path / "a.sh")]) == 2
    assert "is a FIFO, which would wait for a reader" in capsys.readouterr().err


def test_a_place_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="a.csv: no permission to write there: pass another file"):
        check_file("--csv", tmp_path / "a.csv")


def test_what_the_system_refuses_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be written .Not a directory.; pass another file"), writing("--png", "a"):
        (tmp_path / "file").write_text("")
        (tmp_path / "file" / "a").write_text("")


def test_a_picture_has_the_name_it_was_given(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture"
    assert cli.main([*PLAN, "--json", "--png", str(file)]) == 0
    assert file.read_bytes()[:4] == b"\x89PNG" and capsys.readouterr().out.startswith('{"plans": ')
