"""Render chat templates, which come with model files, in a separate process with limits.

A template may loop for ever or fill the memory, even within one interpreter operation that no
signal handler can interrupt. The kernel ends the process, and the next chat starts another.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from ...text.input_errors import NeverSkipped
from .template_server import BYTES, REMEDY, RENDER, serve

SECONDS = 5.0  # for one rendering; published templates take milliseconds
CHARACTERS = 2**20  # of text that any chat may be rendered to, and
GROWTH = 16  # characters of text for each byte of a chat with its template: tokenizers abort on texts without end
START_SECONDS = 600.0  # until transformers is imported, from a busy file system
SPARE_SECONDS = 60.0  # after which a process that the kernel did not end is killed
LARGEST_TEMPLATE = 2**18  # bytes of a template
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"from {serve.__module__} import serve; serve(int(sys.argv[2]))"
)


class TemplateRefusal(Exception):
    """One-line error of a template or transformers."""


class TemplateLimit(NeverSkipped):
    """Error of a template that exceeds its limits: every chat would take as long."""


def apply_chat_template(library: Any, messages: Any, **options: Any) -> Any:
    """Render a chat with transformers in the other process.

    Raises TemplateLimit and TemplateRefusal.
    """
    return _apply(type(library).apply_chat_template)(library, messages, **options)


@functools.cache
def _apply(method: Any) -> Callable[..., Any]:
    """Return a copy of apply_chat_template that calls `TemplateProcess.render` in place of RENDER."""
    code = getattr(method, "__code__", None)
    if code is None or RENDER not in code.co_names:
        import transformers

        raise TemplateRefusal(
            f"transformers {transformers.__version__} does not render by {RENDER}: install the "
            "version in requirements.txt"
        )
    names = {**method.__globals__, RENDER: _process.render}
    copy = FunctionType(code, names, code.co_name, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


class TemplateProcess:
    """Process that renders templates one at a time, started by the first call and after each limit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, **call: Any) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Return rendered texts, and character ranges of {% generation %} blocks in each.

        Raises TemplateLimit beyond a limit, TemplateRefusal for an error in the template.
        """
        text = json.dumps(call, default=_plain)
        limits = {"seconds": SECONDS, "characters": max(CHARACTERS, GROWTH * len(text))}
        line = f'{{"limits": {json.dumps(limits)}, "call": {text}}}\n'.encode()
        with self._lock:
            try:
                answer = self._ask(line)
            except BaseException:  # an answer that nobody reads would be that of the next chat
                self.close(kill=True)
                raise
        reply = json.loads(answer)
        if "limit" in reply:
            raise TemplateLimit(reply["limit"])
        if "error" in reply:
            raise TemplateRefusal(reply["error"])
        return reply["texts"], reply["places"]

    def close(self, kill: bool = False) -> None:
        if process := self._disconnect():
            if kill:
                process.kill()
            process.wait()

    def forget(self) -> None:
        if process := self._disconnect():
            process.returncode = 0  # it is no child of this process
        self._lock = threading.Lock()

    def _disconnect(self) -> subprocess.Popen[bytes] | None:
        process = self._process
        self._process = None
        for stream in (process.stdin, process.stdout) if process else ():
            if stream is not None:
                stream.close()
        return process

    def _ask(self, line: bytes) -> bytes:
        process = self._process or self._start()
        try:
            _write(process, line)
        except BrokenPipeError:  # it was ended between two chats
            self.close(kill=True)
            process = self._start()
            _write(process, line)
        answer = _read_line(process, SECONDS + SPARE_SECONDS)
        if not answer.endswith(b"\n"):
            raise TemplateLimit(_end(process.wait()))
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path), str(BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # signals to this program's group are not for it
        )
        if not _read_line(self._process, START_SECONDS).endswith(b"\n"):
            status = self._process.wait()
            raise TemplateRefusal(f"the process that renders did not start ({_status(status)})")
        return self._process


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no value of JSON")


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(line)
    while rest:
        rest = rest[process.stdin.write(rest) :]


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    blocks = [b""]
    while not blocks[-1].endswith(b"\n"):
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            process.kill()
            break
        block = os.read(descriptor, 2**20)
        if not block:
            break
        blocks.append(block)
    return b"".join(blocks)


def _end(status: int) -> str:
    if status in (-signal.SIGALRM, -signal.SIGKILL):
        return f"it did not end within {SECONDS:g} s; {REMEDY}"
    return f"the process that renders it ended by {_status(status)}; {REMEDY}"


def _status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


_process = TemplateProcess()
atexit.register(_process.close)
os.register_at_fork(after_in_child=_process.forget)
