"""Files and samples of chats: masks, packing, epochs, and chats that are too long."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_megatron.cli.arguments import make_run, parse
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.chat.chat_dataset import (
    PADDING,
    ChatDataset,
    Packing,
    lost_lines,
    packing_lines,
)
from fugaku_megatron.data.chat.chat_files import ChatFiles, ChatWriter, signed, unsigned
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.data.marks import COUNTED, FIRST
from fugaku_megatron.run.dry_run import report
from tests.checks.chats import (
    signed_chats,
    write_chats,
)

pytestmark = pytest.mark.unit


def write_masks(prefix: Path, masks: list[list[bool]]) -> ChatFiles:
    """Write chats with these trained tokens."""
    with ChatWriter(prefix, "<u2") as writer:
        for mask in masks:
            writer.add_document(signed(np.arange(len(mask)), np.array(mask)))
    return ChatFiles(prefix)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=20))
@settings(max_examples=50)
def test_masks_are_read_as_they_were_written(tmp_path_factory, masks):
    prefix = tmp_path_factory.mktemp("chats") / "c"
    files = write_masks(prefix, masks)
    written = [unsigned(chat) for chat in signed_chats(files)]
    assert [trained.tolist() for _, trained in written] == masks
    assert [ids.tolist() for ids, _ in written] == [[*range(len(mask))] for mask in masks]
    assert os.path.getsize(f"{prefix}.mask") == 36 + -(-sum(map(len, masks)) // 8)
    counted = files.count_trained(0, np.array([*map(len, masks)]))
    assert counted.sum() == sum(sum(mask[1:]) for mask in masks)


def test_a_mask_that_does_not_fit_is_refused(tmp_path):
    write_chats(tmp_path / "a", [9, 8])
    write_chats(tmp_path / "longer", [9, 9])
    write_chats(tmp_path / "lengths", [8, 9])
    write_chats(tmp_path / "tokens", [9, 8], token=6)
    good = (tmp_path / "a.mask").read_bytes()
    longer, lengths, tokens = (
        (tmp_path / f"{name}.mask").read_bytes() for name in ("longer", "lengths", "tokens")
    )
    another = r"it belongs to another .*a\.bin of as many tokens"
    for content, reason in (
        (longer, r"it is the mask of 18 tokens, and .*a\.bin has 17"),
        (lengths, another),
        (tokens, another),
        (good[:-1], "2 bytes of bits"),
        (good[:-1] + b"\xff", "damaged"),
        (good[:10], "not a mask"),
        (b"", "not a mask"),
        (good[:8] + b"\2" + good[9:], "version 2, and version 1 is known"),
    ):
        (tmp_path / "a.mask").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.mask: .*{reason}"):
            ChatFiles(tmp_path / "a")
    (tmp_path / "a.mask").unlink()
    with pytest.raises(ValueError, match=r"a\.mask: cannot be read .* preprocess --chat writes"):
        ChatFiles(tmp_path / "a")


def test_chats_are_not_read_as_pretraining_data(tmp_path):
    """Such a run would train the user's turns."""
    write_chats(tmp_path / "a", [9, 8, 7])
    with pytest.raises(
        ValueError,
        match=r"a\.mask says which tokens .* without --sft trains all of them: pass --sft",
    ):
        build_datasets([str(tmp_path / "a")], "100,0,0", (1, 0, 0), Builder(8, 1))
    (tmp_path / "a.mask").unlink()
    assert build_datasets([str(tmp_path / "a")], "100,0,0", (1, 0, 0), Builder(8, 1))[0] is not None


@pytest.mark.parametrize("renamed", range(3))
def test_files_of_a_killed_writer_do_not_look_whole(tmp_path, monkeypatch, renamed):
    write_chats(tmp_path / "a", [9, 8])
    replace = os.replace
    done = []

    def killed(source, target):
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_chats(tmp_path / "a", [7, 6])
    with pytest.raises(ValueError, match="cannot be read"):
        IndexedDataset(tmp_path / "a")
    assert not list(tmp_path.glob("*.tmp*"))


# Packing -------------------------------------------------------------------------------------------------------------------------


def fitted(lengths, size: int) -> list[int]:
    """Return the room left in each sample after best fit decreasing, chat by chat."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(size)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return sorted(rooms)


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            st.just(size), st.lists(st.integers(1, size), min_size=1, max_size=80)
        )
    )
)
@settings(max_examples=300)
def test_packing_is_best_fit_decreasing(case):
    size, lengths = case
    lengths = -np.sort(-np.array(lengths))
    packing = Packing.of(lengths, size)
    samples = [packing.of_sample(i).tolist() for i in range(len(packing))]
    assert sorted(sum(samples, [])) == [*range(len(lengths))], "every chat once"
    assert sorted(size - int(lengths[sample].sum()) for sample in samples) == fitted(lengths, size)


def chats_of(
    files: ChatFiles, chats: range | None = None, name="train", count=1, length=16, seed=1, **more
) -> ChatDataset:
    """Return the data of these chats, by default of all."""
    chats = range(len(files)) if chats is None else chats
    return ChatDataset(files, name, chats, count, DatasetConfig(length, seed), **more)


@given(
    st.lists(st.integers(2, 17), min_size=1, max_size=30).filter(lambda lengths: max(lengths) > 2),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_samples_hold_whole_chats_and_each_epoch_has_every_chat_once(
    tmp_path_factory, lengths, seed
):
    files = write_chats(tmp_path_factory.mktemp("chats") / "c", lengths)
    data = chats_of(files, seed=seed)
    again = chats_of(files, count=3 * len(data), seed=seed)
    assert again.num_epochs == 3 and len(again) == 3 * len(data)
    counted = 0
    for epoch in range(3):
        chats: list[int] = []
        for i in range(epoch * len(data), (epoch + 1) * len(data)):
            tokens, marks = again[i]
            own = again.chats_of(i)
            expected = np.concatenate([files.get(chat) for chat in own])
            assert len(tokens) == 17 and tokens[: len(expected)].tolist() == expected.tolist()
            assert (
                not (tokens[len(expected) :] - PADDING).any()
                and not (marks[len(expected) :] & COUNTED).any()
            )
            begins = np.cumsum([0, *(lengths[chat] for chat in own)])
            assert np.flatnonzero(marks & FIRST).tolist() == [
                begin for begin in begins.tolist() if begin < 17
            ]
            for begin, chat in zip(begins, own):
                place = marks[begin : begin + lengths[chat]] & COUNTED
                assert place.tolist() == [0, 0, *[1] * len(place)][: len(place)]
            chats += own
            counted += int((marks & COUNTED).sum())
        assert sorted(chats) == [*range(len(lengths))]
    assert counted == 3 * data.num_trained == 3 * sum(length - 2 for length in lengths)
    fresh = chats_of(files, count=3 * len(data), seed=seed)
    last = len(fresh) - 1
    assert np.array_equal(fresh[last], again[last]) and np.array_equal(fresh[0], data[0]), (
        "of the seed and the number alone"
    )


def test_chats_that_are_too_long(tmp_path):
    files = write_chats(tmp_path / "c", [5, 30, 17, 40])
    with pytest.raises(
        ValueError,
        match=r"train data of .*c: chat 1, counted from 0, has 30 tokens, and a sample takes "
        r"--seq-length 16 \+ 1; 2 of 3 chats are too long, the longest has 40: .*--sft-truncate",
    ):
        chats_of(files, range(1, 4))
    data = chats_of(files, range(1, 4), truncate=True)
    assert (
        data.num_tokens == 51 and len(data) == 3 and data.chats_cut == 2 and data.num_trained == 45
    )
    assert (
        sorted(data[i][0, 0] for i in range(3)) == [10, 40, 57] and (np.diff(data[0][0]) == 1).all()
    )
    assert packing_lines(data) == [
        f"train data of {tmp_path}/c: 3 chats of 51 tokens in 3 samples of 17 an epoch: 100.0% is not "
        "padding, 88.2% counts in the loss; --sft-truncate cut 2 chats"
    ]
    with pytest.raises(ValueError, match="it has no chats"):
        chats_of(files, range(0), "valid")


def test_chats_without_a_trained_token_are_counted_and_refused_if_they_are_all(tmp_path):
    late = [False] * 20 + [True] * 5
    early = [False] * 5 + [True] * 5
    first = [True] + [False] * 5  # nothing predicts the first token
    files = write_masks(tmp_path / "c", [late, early, late, first])
    data = chats_of(files, truncate=True)
    assert data.chats_lost == 3 and data.num_trained == 5
    said = lost_lines(data, None)
    assert len(said) == 1 and "warning: train data of" in said[0]
    assert "3 of 4 chats have no trained token in their first 17 tokens" in said[0]
    assert "raise --seq-length" in said[0] and lost_lines(None) == []
    whole = chats_of(files, length=32)
    assert whole.chats_lost == 1 and "--seq-length" not in lost_lines(whole)[0]
    with pytest.raises(
        ValueError,
        match=r"valid data of .*c: none of its 17 tokens is trained: --sft-truncate cut the answers of 1 of 1 chats away: "
        "raise --seq-length, which is 16",
    ):
        chats_of(files, range(2, 3), "valid", truncate=True)
    with pytest.raises(
        ValueError, match=r"none of its 6 tokens is trained, as its \.mask file says"
    ):
        chats_of(files, range(3, 4))


def test_a_run_reads_blends_and_splits_of_chats(tmp_path):
    for name, lengths in (("a", [5, 6, 7] * 10), ("b", [9] * 20)):
        write_chats(tmp_path / name, lengths, token=5 if name == "a" else 1000)
    paths = ["3", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    train, valid, _ = build_datasets(
        paths, "80,20,0", (60, 4, 0), Builder(16, 1, vocab_size=2000, cuts_chats=False)
    )
    first = [train[i] for i in range(60)]
    assert (
        all(sample.shape == (2, 17) for sample in first)
        and sum(sample[0, 0] >= 1000 for sample in first) == 15
    )
    assert len(packing_lines(train)) == 2 and valid[0].shape == (2, 17)
    held_out = {
        chat for part in valid.datasets for i in range(len(part)) for chat in part.chats_of(i)
    }
    trained = {
        chat for i in range(len(train.datasets[0])) for chat in train.datasets[0].chats_of(i)
    }
    assert trained == {*range(24)} and held_out >= {*range(24, 30)}
    with pytest.raises(ValueError, match=r"a\.bin: token id .* is outside the vocabulary of 20"):
        build_datasets(
            paths, "100,0,0", (60, 0, 0), Builder(16, 1, vocab_size=20, cuts_chats=False)
        )


def test_flags_and_the_plan(tmp_path, tokenizer):
    write_chats(tmp_path / "a", [5, 6, 7] * 10)
    assert any(
        "--sft-truncate" in note and "--sft" in note
        for note in parse(["--recipe", "demo", "--sft-truncate"]).notes
    )
    values = {
        "sft": True,
        "data_path": (str(tmp_path / "a"),),
        "split": "100,0,0",
        "vocab_size": 1000,
    }
    assert "30 chats of 180 tokens in 2 samples of 129 an epoch: 69.8% is not padding" in report(
        make_run("demo", values), 1
    )
    with pytest.raises(ValueError, match="chat 1, counted from 0, has 6 tokens"):
        report(make_run("demo", {**values, "seq_length": 4}), 1)
