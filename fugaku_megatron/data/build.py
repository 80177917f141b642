"""A run's data sets from --data-path with --split, or from one flag a split.

Rules: blended_megatron_dataset_builder.py, utils.py and blended_megatron_dataset_config.py in
    Megatron-LM's megatron/core/datasets; for --legacy-split megatron/data/dataset_utils.py before
    Megatron-core 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..comm.agreement import on_root
from ..tokenizers.vocabulary import check_tokens
from .chat.chat_dataset import ChatDataset
from .chat.chat_files import ChatArrays, ChatFiles, check_not_chats
from .data_flags import parse_data_path, parse_split, split_documents
from .dataset import (
    SPLITS,
    BlendedDataset,
    Dataset,
    DatasetConfig,
    GPTDataset,
    ValidationSets,
    length_flags,
    normalize,
)
from .indexed import IndexedDataset
from .marks import DocumentDataset
from .token_arrays import TokenArrays
from .token_files import open_tokens

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
    inter_document_masking: mark where documents begin
    """

    arrays: Mapping[str, TokenArrays] = field(default_factory=dict)
    separate_sets: bool = False
    cuts_chats: bool | None = None
    begun: Sequence[int | None] = (None, None, None)
    inter_document_masking: bool = False

    def open(self, prefixes: Sequence[str]) -> dict[str, Indexed]:
        return {prefix: self._open(prefix) for prefix in dict.fromkeys(prefixes)}

    def _open(self, prefix: str) -> Indexed:
        if prefix in self.arrays:
            return self.arrays[prefix].measure(self.vocab_size, self.comm)
        if self.cuts_chats is None:
            on_root(self.comm, lambda: check_not_chats(prefix))
        indexed = (ChatFiles if self.cuts_chats is not None else open_tokens)(prefix, self.comm)
        vocabulary = self.vocab_size
        if vocabulary is not None:
            start = CHECKED_AT_START // indexed.dtype.itemsize
            on_root(
                self.comm,
                lambda: check_tokens(indexed.read_tokens(0, start), vocabulary, indexed.path),
            )
        return indexed

    def dataset(
        self, source: Source, name: str, num_samples: int | None, begun: int | None
    ) -> Dataset:
        indexed, documents = source
        if isinstance(indexed, (ChatFiles, ChatArrays)):
            truncate = self.cuts_chats is True
            return ChatDataset(indexed, name, documents, num_samples, self, truncate)
        kind = DocumentDataset if self.inter_document_masking else GPTDataset
        return kind(indexed, name, documents, num_samples, self, begun)

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
