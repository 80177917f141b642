"""A text and transformers' likelihoods."""

import torch

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.inference import evaluate
from tests.checks.generation import LEARNS, TEXT

LENGTH = LEARNS["seq_length"]
PROSE = TEXT * 6 + "that is the question: whether 'tis nobler é"


def their_likelihoods(theirs, ids: list[int]) -> torch.Tensor:
    """Return every token's log-likelihood, except the first."""
    with torch.no_grad():
        logits = theirs(torch.tensor([ids[:-1]])).logits[0].double()
    return torch.log_softmax(logits, 1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def result(flags: list[str], *more: str, world=None) -> dict:
    parser = Parser()
    evaluate.add_arguments(parser)
    options = parser.parse_args([*flags, *more])
    return evaluate.evaluate(evaluate.Request.of(options), world or SoloComm())
