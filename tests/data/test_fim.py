"""Fill-in-the-middle samples: the rule of Megatron-LM's fim_dataset.py, undone; resumed and split at files."""

from __future__ import annotations

import numpy as np
import pytest

from fugaku_megatron.config.data import DataConfig
from fugaku_megatron.data.dataset import MockDataset, ValidationSets
from fugaku_megatron.data.fim import FimDataset, FimRule, FimTokens, fill_in_middle
from fugaku_megatron.run.data import fim_rule
from fugaku_megatron.tokenizers.byte_level_bpe import GPT2BPETokenizer, gpt2_files
from fugaku_megatron.tokenizers.tokenizer import NullTokenizer

pytestmark = pytest.mark.unit

S = 48
TOKENS = FimTokens(prefix=200, middle=201, suffix=202, pad=203, eod=3, split=7)


class Letters(NullTokenizer):
    """A token for each character."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def rearranged(rule, count=400, seed=5):
    """Return samples of numbers below 40, and the same samples rearranged."""
    plain = MockDataset(40, S, count, 1)
    return plain, FimDataset(plain, rule, Letters(256), seed)


def documents(sample: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in sample.tolist():
        if token == TOKENS.eod:
            found.append([])
        else:
            found[-1].append(token)
    return found


def undone(tokens: list[int]) -> tuple[list[int], str]:
    """Return a file's original tokens, and its order: psm, spm, or none."""
    if not tokens or tokens[0] != TOKENS.prefix:
        return tokens, ""
    middle = tokens.index(TOKENS.middle)
    suffix = tokens.index(TOKENS.suffix)
    if suffix == 1:
        return [*tokens[middle + 1 :], *tokens[2:middle]], "spm"
    return [*tokens[1:suffix], *tokens[middle + 1 :], *tokens[suffix + 1 : middle]], "psm"


def test_every_whole_document_has_all_its_tokens_in_one_of_two_orders():
    rule = FimRule(TOKENS._replace(split=None), rate=0.7, spm_rate=0.25)
    plain, fim = rearranged(rule)
    orders = []
    for index in range(len(plain)):
        sample = fim[index]
        assert sample.shape == (S + 1,) and sample.dtype == np.int64
        assert np.array_equal(fim[index], sample), "a sample is a function of its number"
        *whole, _ = documents(sample)  # the last one may be truncated
        for document, original in zip(whole, documents(plain[index]), strict=False):
            tokens, order = undone(document)
            assert tokens == original
            if len(original) > 12:  # many prefixes of short ones are empty: both orders look alike
                orders.append(order)
    shares = [orders.count(order) / len(orders) for order in ("psm", "spm")]
    assert shares == pytest.approx([0.7 * 0.75, 0.7 * 0.25], abs=0.1) and len(orders) > 100


def test_rates_of_none_and_all():
    plain, fim = rearranged(FimRule(TOKENS, rate=0.0, spm_rate=0.5, fragment_rate=1.0))
    assert all(np.array_equal(fim[index], plain[index]) for index in range(50))
    other = FimDataset(plain, FimRule(TOKENS, 1.0, 0.5, 1.0), Letters(256), seed=6)
    same = FimDataset(plain, FimRule(TOKENS, 1.0, 0.5, 1.0), Letters(256), seed=6)
    third = FimDataset(plain, FimRule(TOKENS, 1.0, 0.5, 1.0), Letters(256), seed=7)
    assert all(np.array_equal(other[index], same[index]) for index in range(50))
    assert any(not np.array_equal(other[index], third[index]) for index in range(50))


def test_files_of_a_document_are_rearranged_one_by_one():
    rule = FimRule(TOKENS, rate=1.0, spm_rate=0.0, fragment_rate=1.0)
    plain, fim = rearranged(rule)
    checked = 0
    for index in range(len(plain)):
        original = plain[index].tolist()
        if TOKENS.eod in original or TOKENS.split not in original[:20]:
            continue
        sample = fim[index].tolist()
        first = sample[: sample.index(TOKENS.split)]
        assert undone(first)[0] == original[: original.index(TOKENS.split)]
        checked += 1
    assert checked > 20


def test_a_text_with_a_prefix_stays():
    rule = FimRule(TOKENS._replace(split=None), 1.0, 0.5, no_prefix=chr(9))
    _, fim = rearranged(rule)
    fixed = np.full(S + 1, 9)
    fim.dataset = [fixed, np.full(S + 1, 8)]
    assert np.array_equal(fim[0], fixed) and fim[1][0] == TOKENS.prefix


def test_a_shorter_sample_is_padded():
    """An encoding that has fewer tokens than the data."""

    class Short(Letters):
        def encode(self, text):
            return super().encode(text)[::4]

    fim = FimDataset([np.full(S + 1, 9)], FimRule(TOKENS, 1.0, 0.5, 1.0), Short(256), 1)
    sample = fim[0]
    assert len(sample) == S + 1 and sample[-1] == TOKENS.pad == 203


def test_validation_sets_have_other_random_numbers():
    rule = FimRule(TOKENS, 1.0, 0.5, 1.0)
    data = MockDataset(40, S, 5, 1)
    sets = fill_in_middle(ValidationSets([data, data]), rule, Letters(256), 1)
    assert isinstance(sets, ValidationSets) and not np.array_equal(sets[0], sets[5])
    assert fill_in_middle(None, rule, Letters(256), 1) is None


def test_tokens_of_the_flags_are_looked_up():
    numbers = {"prefix": "250", "middle": "251", "suffix": "252", "pad": "253", "eod": "254"}
    flags = {f"fim_{name}_token": number for name, number in numbers.items()}
    data = DataConfig(
        data_path=("d",),
        fim_data=True,
        fim_split_sample="9",
        fim_fragment_rate=0.25,
        fim_rate=1.0,
        **flags,
    )
    rule = fim_rule(data, NullTokenizer(256))
    assert rule == FimRule(FimTokens(250, 251, 252, 253, 254, 9), 1.0, 0.5, 0.25)
    with pytest.raises(ValueError, match="--fim-prefix-token '250' is no token of the run's Null"):
        fim_rule(data, NullTokenizer(9))


def test_gpt_2_has_no_tokens_for_it():
    tokenizer = GPT2BPETokenizer(*gpt2_files())
    assert tokenizer.token_id("<|endoftext|>") == 50256 and tokenizer.token_id("hello") == 31373
    message = "--fim-prefix-token '<fim_prefix>' is no token of the run's GPT2BPETokenizer"
    with pytest.raises(ValueError, match=message):
        fim_rule(DataConfig(data_path=("d",), fim_data=True), tokenizer)
