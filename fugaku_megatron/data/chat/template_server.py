"""Process that renders chat templates within limits of time, memory and text."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...text.named_files import JsonObject

BYTES = 2**30  # of memory that rendering may add
REASON = 2000  # characters of a template's own message
REMEDY = "pass another template as --chat-template FILE"
RENDER = "render_jinja_template"  # the function of transformers that renders


def serve(size: int) -> None:
    """Render calls from lines of JSON. size: memory limit above current use, in bytes."""
    from transformers.utils import chat_template_utils

    render = getattr(chat_template_utils, RENDER)
    _limit_memory(size)
    sys.stdout.buffer.write(_line({}))
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limits = request["limits"]
        # Nothing handles the signal, so that the kernel ends this process, whatever it does.
        signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
        reply = _reply(render, request["call"], limits["characters"])
        answer = _line(reply)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _reply(render: Callable[..., Any], call: Mapping[str, Any], characters: int) -> JsonObject:
    try:
        texts, places = render(**call)
        count = sum(map(len, texts))
        if count > characters:
            return {"limit": f"its text has {count} characters, more than {characters}; {REMEDY}"}
        return {"texts": texts, "places": places}
    except MemoryError:
        return {"limit": f"it takes more than {BYTES >> 20} MiB of memory; {REMEDY}"}
    except Exception as error:  # the template's own, or any of the library
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:REASON].split())}


def _line(reply: Mapping[str, Any]) -> bytes:
    return json.dumps(reply).encode() + b"\n"


def _limit_memory(size: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
