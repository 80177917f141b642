"""On the path in tests' MPI jobs: no pictures, less of torch; a wrong gradient and waiting ranks if variables ask for them.

The process that draws the losses after a save takes longer than a run. It ends at once. FAULT_GRADIENT is
rank,call,element,mark: that call to attention's backward on that rank leaves a NaN in its result, and creates the file `mark`.
FAULT_HOLD is mark:iteration:...; after each of these iterations, the first time, the last rank waits to be killed.
`mark`.iteration is then a link to its process number. FAULT_HOLD_IMPORT is a mark: every rank creates `mark`.process and waits
in an import until a signal comes. FAULT_NODES is a file with the node of each rank, and a folder after a colon with a folder
for each node, which takes the place of its /dev/shm for copies of the state. FAULT_LOCK is file:beat:patience: the lock of
--save has these seconds and another kernel, as on another node, and `file` gets a line for each call that changes a file, and
for each check of the lock: time, thread, event, path.
"""

import importlib.util
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path

KERNELS = "fugaku_megatron._kernels"
TRAINER = "fugaku_megatron.training.trainer"
META = "torch._meta_registrations"
LOCK = "fugaku_megatron.checkpoint.lock"
SLOT = "fugaku_megatron.checkpoint.memory_slot"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
CHANGES = ("os.rename", "os.link", "os.mkdir", "shutil.rmtree")  # audit events
USERS_OF_META = ("torch._dynamo", "transformers")
GENERATOR_METACLASSES = (  # torch 2.15, 2.13
    ("torch._custom_class_base", "CustomClassBaseMeta"),
    ("torch._opaque_base", "OpaqueBaseMeta"),
)


class WithoutMeta:
    """Skips torch's Python operators on meta tensors, a fifth of its import, until a library that uses them is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == META:
            return importlib.util.spec_from_loader(name, self)
        if name in USERS_OF_META:
            sys.meta_path.remove(self)
            sys.modules.pop(META, None)
            importlib.import_module(META)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        """Let torch make generators, as a module of these operators does from 2.13 on."""
        import torch

        if not hasattr(torch._C, "_set_generator_metaclass"):
            return
        for base, metaclass in GENERATOR_METACLASSES:
            if importlib.util.find_spec(base):
                made = getattr(importlib.import_module(base), metaclass)
                torch._C._set_generator_metaclass(made)
                return


class Changed:
    """Finds a module and changes it once it is loaded."""

    def __init__(self, name, change):
        self.name = name
        self.change = change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), self.change(module))
        return spec


def spoil_gradient(module, call, element, mark):
    right = module.attention_backward
    left = int(call)

    def attention_backward(*args, **kwargs):
        nonlocal left
        right(*args, **kwargs)
        left -= 1
        if left == 0:
            gradient = args[4].view(-1)
            gradient[int(element) % gradient.numel()] = float("nan")
            Path(mark).touch()

    module.attention_backward = attention_backward


def hold(module, mark, *iterations):
    step = module.Trainer.train_step

    def train_step(self):
        link = Path(f"{mark}.{self.progress.iteration}")
        if (
            str(self.progress.iteration) in iterations
            and self.world.rank == self.world.size - 1
            and not link.is_symlink()
        ):
            link.symlink_to(str(os.getpid()))
            while True:
                time.sleep(60)
        return step(self)

    module.Trainer.train_step = train_step


def await_signal(mark):
    here, there = os.pipe()
    os.set_blocking(there, False)
    before = signal.set_wakeup_fd(there)
    Path(f"{mark}.{os.getpid()}").touch()
    os.read(here, 1)
    signal.set_wakeup_fd(before)


def emulate_node(places, folder):
    """Give this rank's node its own name, and its own memory for copies of the state."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), None)
    if rank is None:
        return
    name = Path(places).read_text().split()[int(rank)]
    own = Path(folder) / name
    platform.node = lambda: name

    def change(module):
        own.mkdir(exist_ok=True)
        module.memory_folder = lambda run: own / "copies"

    sys.meta_path.insert(0, Changed(SLOT, change))


def shorten_lock(module, beat, patience, trace):
    check = module.Lock.check

    def traced(self):
        begin = time.time()  # the job may stand still after it has read the lock
        check(self)
        trace("check", self.path, begin)

    module.Lock.check = traced
    module.BEAT = float(beat)
    module.PATIENCE = float(patience)
    module._kernel = lambda: str(os.getpid())


def trace_changes(file):
    """Append every rename, removal, new folder and file opened for writing to `file`; return the function that appends."""
    trace = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(event, path, when):
        os.write(trace, f"{when} {threading.get_native_id()} {event} {path}\n".encode())

    def hook(event, args):
        writes = event == "open" and args[1] is not None and set(str(args[1])) & set("wxa+")
        if writes or event in CHANGES:
            append(event, args[0], time.time())

    sys.addaudithook(hook)
    return append


if {"fugaku_megatron.observe.log.loss_plot", "loss"} <= {*sys.orig_argv}:
    os._exit(0)
sys.meta_path.insert(0, WithoutMeta())
rank, _, fault = os.environ.get("FAULT_GRADIENT", "").partition(",")
if fault and os.environ.get("PMI_RANK") == rank:
    sys.meta_path.insert(
        0, Changed(KERNELS, lambda module: spoil_gradient(module, *fault.split(",")))
    )
if "FAULT_HOLD" in os.environ:
    sys.meta_path.insert(
        0, Changed(TRAINER, lambda module: hold(module, *os.environ["FAULT_HOLD"].split(":")))
    )
if "FAULT_HOLD_IMPORT" in os.environ:
    sys.meta_path.insert(
        0, Changed(TRAINER, lambda module: await_signal(os.environ["FAULT_HOLD_IMPORT"]))
    )
if "FAULT_NODES" in os.environ:
    emulate_node(*os.environ["FAULT_NODES"].split(":"))
if "FAULT_LOCK" in os.environ:
    changes, *seconds = os.environ["FAULT_LOCK"].split(":")
    trace = trace_changes(changes)
    sys.meta_path.insert(0, Changed(LOCK, lambda module: shorten_lock(module, *seconds, trace)))
