"""Build a run's data sets from --data-path with --split, or from one flag a split.

Rules: blended_megatron_dataset_builder.py, utils.py and blended_megatron_dataset_config.py in
    Megatron-LM's megatron/core/datasets; for --legacy-split megatron/data/dataset_utils.py before
    Megatron-core 0.5.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from ..comm.agreement import on_root
from ..text.named_files import read_text, unique_keys
from .chat_dataset import ChatArrays, ChatDataset, ChatFiles, check_not_chats
from .dataset import (
    SPLITS,
    BlendedDataset,
    Dataset,
    DatasetConfig,
    GPTDataset,
    ValidationSets,
    length_flags,
    normalize,
    shares_of,
)
from .indexed import IndexedDataset
from .token_arrays import TokenArrays
from .token_range import check_tokens

BLEND_SURPLUS = 0.005  # Megatron's: samples built beyond a blended dataset's share
CHECKED_AT_START = (
    4 * 2**20
)  # bytes of .bin whose token ids are checked when it is opened; later ones when they are fetched

Indexed = IndexedDataset | TokenArrays
Source = tuple[Indexed, range]  # and the documents of a split
Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]  # train, valid, test


@dataclass(frozen=True)
class Builder(DatasetConfig):
    """Data sets that share a configuration. Collective over `comm`.

    arrays: in-memory documents by the name that replaces a prefix
    separate_sets: --multiple-validation-sets
    cuts_chats: truncate chats that are too long; False: refuse them; None: not chats
    """

    arrays: Mapping[str, TokenArrays] = field(default_factory=dict)
    separate_sets: bool = False
    cuts_chats: bool | None = None
    begun: Sequence[int | None] = (None, None, None)

    def open(self, prefixes: Sequence[str]) -> dict[str, Indexed]:
        return {prefix: self._open(prefix) for prefix in dict.fromkeys(prefixes)}

    def _open(self, prefix: str) -> Indexed:
        if prefix in self.arrays:
            return self.arrays[prefix].measure(self.vocab_size, self.comm)
        if self.cuts_chats is None:
            on_root(self.comm, lambda: check_not_chats(prefix))
        indexed = (ChatFiles if self.cuts_chats is not None else IndexedDataset)(prefix, self.comm)
        vocabulary = self.vocab_size
        if vocabulary is not None:
            start = CHECKED_AT_START // indexed.dtype.itemsize
            on_root(
                self.comm,
                lambda: check_tokens(indexed.read_tokens(0, start), vocabulary, f"{prefix}.bin"),
            )
        return indexed

    def dataset(
        self, source: Source, name: str, num_samples: int | None, begun: int | None
    ) -> Dataset:
        indexed, documents = source
        if isinstance(indexed, (ChatFiles, ChatArrays)):
            truncate = self.cuts_chats is True
            return ChatDataset(indexed, name, documents, num_samples, self, truncate)
        return GPTDataset(indexed, name, documents, num_samples, self, begun)

    def blend(
        self,
        sources: Sequence[Source],
        name: str,
        num_samples: int | None,
        weights: Sequence[float] | None,
    ) -> Dataset:
        """Blend `num_samples` samples: by weight, each with a small surplus, or else by length.

        Without weights each of several sources is read at most once; None: every sample once.
        """
        prefix = sources[0][0].prefix
        if num_samples is None:
            on_root(self.comm, lambda: _check_unweighted(weights, prefix))
        begun = self.begun[SPLITS.index(name)] or num_samples
        if self.separate_sets and name == SPLITS[1]:
            return ValidationSets(
                [self.dataset(source, name, num_samples, begun) for source in sources]
            )
        if weights is None and len(sources) == 1:
            return self.dataset(sources[0], name, num_samples, begun)
        blended = partial(
            BlendedDataset, name=name, cache=self.cache, prefix=prefix, comm=self.comm
        )
        if weights is None:
            datasets = [self.dataset(source, name, None, None) for source in sources]
            lengths = [len(dataset) for dataset in datasets]
            taken = sum(lengths) if num_samples is None else num_samples
            on_root(self.comm, lambda: _check_once(taken, sum(lengths), name))
            return blended(datasets, lengths, taken)
        assert num_samples is not None and begun is not None, "_check_unweighted has seen to it"
        shares = normalize(weights)
        datasets = [
            self.dataset(source, name, _share(num_samples, share), _share(begun, share))
            for source, share in zip(sources, shares)
        ]
        return blended(datasets, shares, num_samples)


def _share(num_samples: int, share: float) -> int:
    return math.ceil(math.ceil(num_samples * share) * (1 + BLEND_SURPLUS))


def _check_unweighted(weights: Sequence[float] | None, prefix: str) -> None:
    if weights is not None:
        raise ValueError(
            f"--full-validation reads every sample of the validation data once, and {prefix} has a weight: leave the "
            "weights of the validation data out, with --train-data-path and --valid-data-path where training has some"
        )


def _check_once(needed: int, available: int, name: str) -> None:
    if needed > available:
        raise ValueError(
            f"{name} data without weights is read once, {available} samples, and the run takes {needed}: pass "
            f"weights, which repeat the data, or fewer {length_flags(name)}"
        )


def build_datasets(
    data_path: Sequence[str],
    split: str,
    num_samples: Sequence[int | None],
    builder: Builder,
    legacy_split: bool = False,
) -> Datasets:
    """Return (train, valid, test) for --data-path and --split, or raise ValueError. Collective.

    num_samples: 0: no data set; None: every sample once, without weights

    valid and test are None if --split assigns them no documents.
    """
    prefixes, weights = parse_data_path(data_path)
    shares = parse_split(split)
    opened = builder.open(prefixes)
    built: list[Dataset | None] = []
    for i, name in enumerate(SPLITS):
        sources = [
            (indexed, split_documents(len(indexed), shares, i, legacy_split))
            for indexed in map(opened.__getitem__, prefixes)
        ]
        if num_samples[i] == 0 or (name != "train" and not any(ids for _, ids in sources)):
            built.append(None)
            continue
        for prefix, (indexed, ids) in zip(prefixes, sources):
            if not ids:
                raise ValueError(
                    f"--split {split}: none of the {len(indexed)} documents of {prefix} falls to {name}: "
                    f"pass a larger share for {name}, or more documents"
                )
        built.append(builder.blend(sources, name, num_samples[i], weights))
    train, valid, test = built
    return train, valid, test


def build_separate_datasets(
    paths: Sequence[Sequence[str] | None],
    num_samples: Sequence[int | None],
    builder: Builder,
) -> Datasets:
    """Return (train, valid, test) for the data path flags of each split.

    The weight of a single prefix is ignored.
    """
    built: list[Dataset | None] = []
    for name, path, needed in zip(SPLITS, paths, num_samples, strict=True):
        if not path or needed == 0:
            built.append(None)
            continue
        prefixes, weights = parse_data_path(path, f"--{name}-data-path")
        opened = builder.open(prefixes)
        sources = [(opened[prefix], range(len(opened[prefix]))) for prefix in prefixes]
        if len(sources) == 1:
            weights = None
        built.append(builder.blend(sources, name, needed, weights))
    train, valid, test = built
    return train, valid, test


# What the flags say: prefixes with weights, and which documents are for training, validation and test -----------------------------


def parse_split(split: str) -> list[float]:
    """Parse "969,30,1" into shares that sum to 1; missing ones are 0."""
    parts = split.split(",")
    number = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*", re.ASCII)
    if not 1 <= len(parts) <= 3 or not all(number.fullmatch(part) for part in parts):
        raise ValueError(
            f"--split {split!r}: pass one to three numbers, none negative, such as 969,30,1 (train,valid,test)"
        )
    shares = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(shares) == 0:
        raise ValueError(
            f"--split {split!r}: all shares are 0; pass a share for train, such as 969,30,1"
        )
    return shares_of(shares)


def listed_data(
    data_args_path: str | None, per_split_data_args_path: str | None
) -> dict[str, tuple[str, ...]]:
    """Read the file of a data arguments flag.

    Rules: Megatron-LM's get_blend_and_blend_per_split (megatron/training/utils.py).
    """
    if data_args_path:
        return {"data_path": tuple(read_text(data_args_path, "--data-args-path").split())}
    if not per_split_data_args_path:
        return {}
    text = read_text(per_split_data_args_path, "--per-split-data-args-path")
    where = f"--per-split-data-args-path {per_split_data_args_path}"
    try:
        given = json.loads(text, object_pairs_hook=unique_keys)
        words = {name: given.get(name) or () for name in ("train", "valid")}
        found = {
            f"{name}_data_path": tuple(value.split() if isinstance(value, str) else map(str, value))
            for name, value in words.items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a JSON object with lists of words as train, valid and test ({error})"
        ) from None
    if not found["train_data_path"]:
        raise ValueError(f"{where}: it has no words for train: add some")
    return {name: words for name, words in found.items() if words}


def parse_data_path(
    data_path: Sequence[str], flag: str = "--data-path"
) -> tuple[list[str], list[float] | None]:
    first = data_path[::2]
    numbers = [_number(item) for item in data_path]
    pairs = "pass prefixes, or pairs: weight prefix weight prefix ..."
    if len(data_path) == 1 or data_path and not any(number is not None for number in numbers):
        return list(data_path), None
    if not data_path or len(data_path) % 2:
        raise ValueError(f"{flag}: {len(data_path)} items ({' '.join(data_path)}); {pairs}")
    wrong = [item for item, number in zip(first, numbers[::2]) if number is None]
    if wrong:
        raise ValueError(f"{flag}: expected a weight, got {wrong[0]!r}; {pairs}")
    weights = [float(item) for item in first]
    normalize(weights, flag)
    return list(data_path[1::2]), weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_documents(
    num_documents: int, shares: Sequence[float], split: int, legacy: bool = False
) -> range:
    """Return a split's document ids, with Megatron's rounding. split: 0 train, 1 valid, 2 test

    legacy: round each share, then move all borders by the surplus
    """
    if not legacy:
        ends = [0.0, *accumulate(shares)]
        return range(round(ends[split] * num_documents), round(ends[split + 1] * num_documents))
    borders = [0, *accumulate(round(share * num_documents) for share in shares)]
    moved = [0, *(max(0, border - (borders[-1] - num_documents)) for border in borders[1:])]
    return range(moved[split], moved[split + 1])
