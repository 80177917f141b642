"""Sessions with the small model, and a writer that keeps its lines."""

from types import SimpleNamespace

from fugaku_megatron.run.loop import Session
from tests.helpers import make_trainer, small_run


class Writer:
    """Log that keeps all printed lines."""

    printing = False
    log_interval = 1

    def __init__(self):
        self.lines = []
        self.print = self.lines.append

    def event(self, iteration, line):
        self.print(line)

    def add(self, metrics):
        pass

    def record(self, kind, **values):
        pass

    def flush(self):
        pass


def session(world, directory, **changes):
    run = small_run(**{"num_layers": 2, "save": str(directory), "train_iters": 5, **changes})
    signals = SimpleNamespace(stop_requested=False)
    return Session(
        make_trainer(world, run), Writer(), run.training.train_iters, (), signals=signals
    )


def run(world, directory, **changes):
    """Run a session, and return the saved iterations by the log."""
    made = session(world, directory, **changes)
    made.run()
    made.trainer.close()
    return [
        int(line.split()[4])
        for line in made.writer.lines
        if line.startswith("saved checkpoint of iteration ")
    ]
