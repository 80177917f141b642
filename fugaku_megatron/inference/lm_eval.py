"""The lm-eval harness on a checkpoint.

    python -m fugaku_megatron.inference.lm_eval --model fugaku_megatron --model_args load=checkpoints --tasks lambada_openai
    mpiexec -n 4 python -m fugaku_megatron.inference.lm_eval --model fugaku_megatron --model_args load=checkpoints ...

registers this model and calls the harness's command line; --model_args are evaluate's flags,
without dashes. Versions with entry points find it by `lm_eval --model fugaku_megatron`, too.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    from lm_eval.api.model import LM
except ImportError as error:
    text = f"the lm-eval harness is missing ({error}): pip install lm_eval, or this package with its extra [lm-eval]"
    raise (SystemExit if __name__ == "__main__" else ImportError)(text) from None

from ..comm.base import Comm, SoloComm
from ..comm.job import run_or_abort
from ..config.fields import check
from .harness import Asker, serve

NAME = "fugaku_megatron"
THEIRS = (
    "batch_size",
    "max_batch_size",
    "device",
)  # what the harness adds to --model_args, from flags of its own


class MegatronLM(LM):  # type: ignore[misc]  # the harness is optional, and not typed
    """lm-eval model. world: ranks that share it; others run `harness.serve`"""

    def __init__(self, world: Comm | None = None, **values: Any) -> None:
        super().__init__()
        size = str(values.get("batch_size"))
        if "micro_batch_size" not in values and size.isdecimal() and int(size) > 0:
            values["micro_batch_size"] = size
        self.asker = Asker(
            world or SoloComm(),
            {name: value for name, value in values.items() if name not in THEIRS},
        )

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return self.asker.likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self.asker.rolling_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self.asker.texts_until([request.args for request in requests])


def evaluate(world: Comm) -> None:
    """Run the harness's command line on the first rank. Collective."""
    if world.rank:
        return serve(world)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    @register_model(NAME)
    class OnTheseRanks(MegatronLM):
        def __init__(self, **values: Any) -> None:
            super().__init__(world, **values)

    check(
        any(word.startswith("--model") for word in sys.argv),
        f"pass --model {NAME} --model_args load=DIR --tasks NAME",
    )
    cli_evaluate()
    world.broadcast_object(None)


if __name__ == "__main__":
    run_or_abort(evaluate)
