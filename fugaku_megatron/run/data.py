"""A run's datasets."""

from __future__ import annotations

import sys

from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.data import FIM_TOKENS, DataConfig
from ..config.fields import flag
from ..config.run_config import RunConfig
from ..costs.plan import Plan
from ..data.dataset import Dataset, MockDataset, ValidationSets
from ..data.fim import FimRule, FimTokens, fill_in_middle
from ..data.index_cache import IN_MEMORY, IndexCache
from ..data.marks import mark
from ..data.reader_group import ReaderGroup
from ..host.allocator import node_bytes
from ..tokenizers.tokenizer import Tokenizer, TokenizerFlags
from ..training.micro_batches import datasets_of, reads_data
from .sources import Sources
from .tokenizer import end_of_document, find_tokenizer

# Training and validation samples, on the ranks that read them.
Data = tuple[Dataset | None, Dataset | None]


def valid_sizes(plan: Plan, valid: Dataset | None, world: Comm) -> tuple[int, ...]:
    """Return each validation set's samples, on every rank. Collective.

    Raise ValueError for a set below a batch of --full-validation.
    """
    own: tuple[int, ...] = ()
    if isinstance(valid, ValidationSets):
        own = tuple(map(len, valid.datasets))
    elif valid is not None:
        own = (len(valid),)
    sizes: tuple[int, ...] = max(world.all_gather_object(own), key=len)
    with everywhere():
        plan.layout.evaluated(plan.config, sizes, 0)
    return sizes


def open_data(
    plan: Plan, groups: Groups, sources: Sources, readers: ReaderGroup | None = None
) -> Data:
    """Open training and validation samples on the ranks that read data; (None, None) elsewhere, and for 0 samples.
    Collective.

    readers: without them every rank that needs data reads
    """
    run = plan.config
    train, valid = _open(plan, groups, sources, readers)
    if run.data.fim_data:
        train, valid = _with_fim(run, groups.world, (train, valid))
    if not run.data.marks_documents:
        return train, valid
    eod = end_of_document(run.data, sources.tokenizer)
    masks_loss = run.data.eod_mask_loss
    return mark(train, eod, masks_loss), mark(valid, eod, masks_loss)


def _with_fim(run: RunConfig, world: Comm, data: Data) -> Data:
    """Return the samples of --fim-data. Collective; every reader builds the tokenizer."""
    flags = on_root(world, lambda: _fim_tokenizer(run))
    rule = on_root(world, lambda: fim_rule(run.data, flags.build()))
    if data == (None, None):
        return data
    tokenizer = flags.build()
    seed = run.training.seed
    train, valid = (
        fill_in_middle(each, rule, tokenizer, seed + number) for number, each in enumerate(data)
    )
    return train, valid


def _fim_tokenizer(run: RunConfig) -> TokenizerFlags:
    flags = find_tokenizer(run)
    if flags is None:
        raise ValueError(
            "--fim-data: texts are tokenized again, and no tokenizer is named: pass --tokenizer-type and "
            "--tokenizer-model, or --vocab-file and --merge-file"
        )
    return flags


def fim_rule(data: DataConfig, tokenizer: Tokenizer) -> FimRule:
    """Return the rule of --fim-data. Raise ValueError for a flag whose text is no token."""
    ids: dict[str, int] = {}
    for name in (*FIM_TOKENS, "fim_split_sample"):
        text = getattr(data, name)
        if text is None:
            continue
        number = tokenizer.token_id(text)
        if number is None:
            raise ValueError(
                f"{flag(name)} {text!r:.40} is no token of the run's {tokenizer.name}: pass one that is, or another "
                "tokenizer"
            )
        ids[name.removeprefix("fim_").partition("_")[0]] = number
    return FimRule(
        FimTokens(**ids),
        data.fim_rate,
        spm_rate=data.fim_spm_rate,
        fragment_rate=data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
    )


def _open(plan: Plan, groups: Groups, sources: Sources, readers: ReaderGroup | None) -> Data:
    run = plan.config
    samples = sources.samples or (plan.length.train_samples, plan.length.valid_samples)
    reads = readers.reads if readers else reads_data(run, groups)
    reading = groups.world.split(0 if reads else 1, groups.world.rank)
    if not reads:
        return None, None
    if run.data.mock_data:
        model = run.model
        seed = run.training.seed
        assert model.vocab_size is not None, "with_vocabulary sets it"
        train, valid = (
            MockDataset(model.vocab_size, model.seq_length, count, seed + number) if count else None
            for number, count in enumerate(samples)
        )
        return train, valid
    order = sources.resume.order
    if run.training.skip_train:  # validation data has the order of one evaluation
        order = order._replace(valid=None)
    arrays = sources.arrays
    in_memory = sys.maxsize if arrays else IN_MEMORY  # arrays have no file to keep an index next to
    cache = IndexCache(run.data.data_cache_path, in_memory)
    begun = (*order, None)
    return datasets_of(run, (*samples, 0), reading, node_bytes(), cache, arrays, begun)[:2]
