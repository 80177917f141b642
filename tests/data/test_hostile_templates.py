"""Chat templates that never end, fill the memory or reach for code: one line, and limits of time and memory."""

from __future__ import annotations

import multiprocessing
import re
import resource
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from fugaku_megatron.data.chat import template_process
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from tests.checks.chats import (
    GOOD,
    TALK,
    preprocess,
    write_lines,
)

pytestmark = pytest.mark.unit

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


# Lists that hold the one before twice: comparing two takes 2**60 steps of one operation.
COMPARED = """{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}
{% endfor %}{{ n.x == n.y }}"""


ENDED = "it did not end within 0.2 s; pass another template"


MEMORY = "it takes more than 1024 MiB"


HOSTILE = [  # (template, message)
    (LOOP, ENDED),
    (COMPARED, ENDED),
    ("{{ 2**(2**30) % 3 }}{{ 3**(2**30) % 5 }}", ENDED),
    ("{{ 1 | round(10**9, 'ceil') }}", ENDED),
    ("{{ 'a' * (10**10) }}", MEMORY),
    ("{{ 'a' | center(10**10) }}", MEMORY),
    ("{{ 'a' | indent(10**10, true) }}", MEMORY),
    ("{{ '%10000000000d' % 1 }}", MEMORY),
    ("{{ '{:10000000000d}'.format(1) }}", MEMORY),
    ("{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}", MEMORY),
    ("{{ 'a' * 10**7 }}", "its text has 10000000 characters, more than 1048576; pass another"),
    ("{% for i in range(10**12) %}{% endfor %}", "OverflowError: Range too big"),
    ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError: "),
    ("{{" + "(" * 5000, "RecursionError: "),
    ("{{ raise_exception('a\nb' * 10**6) }}", "TemplateError: a ba b"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: "),
    ("{{ cycler.__init__.__globals__.os.popen('true').read() }}", "SecurityError: "),
]


RARE = (  # other ways to the same limit on memory
    "{{ 'a' | center(10**10) }}",
    "{{ 'a' | indent(10**10, true) }}",
    "{{ '{:10000000000d}'.format(1) }}",
)


@pytest.mark.parametrize(
    "template, message",
    [pytest.param(*row, marks=pytest.mark.full if row[0] in RARE else ()) for row in HOSTILE],
)
def test_a_hostile_template_ends_with_one_line(tokenizer, template, message, monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.2 if message == ENDED else 20.0)
    with pytest.raises(ValueError, match=re.escape(f"cannot render it ({message}")) as refused:
        ChatTemplate(tokenizer, template).prompt(TALK)
    assert "\n" not in str(refused.value)


def test_a_template_has_a_largest_size(tokenizer):
    with pytest.raises(
        ValueError, match="has 262145 characters, more than 262144: pass another one"
    ):
        ChatTemplate(tokenizer, "a" * (template_process.LARGEST_TEMPLATE + 1))


def test_a_template_has_its_limits_on_every_thread(tokenizer, monkeypatch):
    """The process of this test, and its limit on memory, are as they were; the next chat is rendered."""
    monkeypatch.setattr(template_process, "SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with ThreadPoolExecutor(2) as pool:
        hostile = pool.submit(ChatTemplate(tokenizer, LOOP).prompt, TALK)
        with pytest.raises(ValueError, match="did not end within"):
            hostile.result(timeout=60)
        monkeypatch.setattr(template_process, "SECONDS", 20.0)
        prompts = list(pool.map(ChatTemplate(tokenizer).prompt, [TALK, TALK[:1]]))
    assert prompts == [ChatTemplate(tokenizer).prompt(talk) for talk in (TALK, TALK[:1])]
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_process_that_renders_is_started_again(tokenizer):
    """Also in a process that was forked, which has to leave its parent's alone."""
    template = ChatTemplate(tokenizer)
    expected = template.prompt(TALK)
    process = template_process._process._process
    assert process is not None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        inherited.append(template)
        assert pool.submit(_prompt_of_the_fork).result(timeout=60) == expected
    assert template.prompt(TALK) == expected and template_process._process._process is process
    process.kill()
    process.wait()
    assert template.prompt(TALK) == expected


inherited: list[ChatTemplate] = []  # by the fork


def _prompt_of_the_fork() -> list[int]:
    assert template_process._process._process is None
    return inherited[-1].prompt(TALK)


def test_preprocess_with_a_hostile_template_ends_with_code_2(folder, tmp_path, monkeypatch, capsys):
    """No chat is left out for it: all would be, after the limit each."""
    monkeypatch.setattr(template_process, "SECONDS", 0.2)
    (tmp_path / "loop.jinja").write_text(LOOP)
    source = write_lines(tmp_path / "a.jsonl", *[GOOD] * 100)
    template = str(tmp_path / "loop.jinja")
    words = ("--skip-invalid", "--workers", "1", "--chat-template", template)
    assert preprocess(folder, source, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert "a.jsonl:1: the chat template cannot render it (it did not end" in error
    assert "did not end within 0.2 s; pass another template as --chat-template" in error
