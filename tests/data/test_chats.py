"""Chats: the trained tokens of each kind of template, the three files, packing, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_megatron.cli.arguments import make_run, parse
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.chat import template_process
from fugaku_megatron.data.chat.chat_dataset import (
    PADDING,
    ChatDataset,
    Packing,
    lost_lines,
    packing_lines,
)
from fugaku_megatron.data.chat.chat_examples import decode_trained
from fugaku_megatron.data.chat.chat_files import ChatFiles, ChatWriter, signed, unsigned
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.data.chat.chats import Chat, read_chat, unread_note
from fugaku_megatron.data.chat.chats import user_turn as user
from fugaku_megatron.data.chat.training_forms import training_form
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.data.input.documents import Document
from fugaku_megatron.data.marks import COUNTED, FIRST
from fugaku_megatron.run.dry_run import report
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.checks.chats import (
    CHATML,
    TALK,
    assistant,
    preprocess,
    write_chats,
    write_lines,
    write_tokenizer,
)

pytestmark = pytest.mark.unit

# The forms of published templates in a few lines, for texts alone: Llama 3, ChatML, Mistral.
LLAMA_3 = """{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|end|>\n\n'
+ message['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
MARKED = """{%- for message in messages %}{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{{ message.content + '<|im_end|>' }}{%- endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
# Those that are changed for training, as far as it goes by their lines. Qwen3 forgets what was thought before the last question.
QWEN_25 = """{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n' + tool_call.name + '()' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN_3 = """{%- set ns = namespace(last_query_index=0) %}
{%- for message in messages %}{%- if message.role == "user" %}{%- set ns.last_query_index = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or reasoning_content %}
                {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
            {%- else %}
                {{- '<|im_start|>assistant\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
ENDLESS = CHATML.replace("+ '<|im_end|>\n' }}", "+ '\n' }}")


THOUGHT = [user("a"), assistant("<think>\nb\n</think>\n\nc"), user("d"), assistant("e")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


def rendered(tokenizer, template: str | None, record: dict) -> str:
    """Return the text of a chat with [+ and +] around trained tokens."""
    tokens = ChatTemplate(tokenizer, template).encode(
        read_chat(Document("a.jsonl", 1, json.dumps(record).encode()))
    )
    return decode_trained(tokens, tokenizer.decode, colour=False)


CASES = {
    "llama 3": (
        LLAMA_3,
        TALK,
        "<s><|start|>user<|end|>\n\none?<|eot|><|start|>assistant<|end|>\n\n[+two<|eot|>+]"
        "<|start|>user<|end|>\n\nand?<|eot|><|start|>assistant<|end|>\n\n[+three<|eot|>+]",
    ),
    "chatml": (
        CHATML,
        TALK,
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n[+two <|im_end|>\n+]"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[+three<|im_end|>\n+]",
    ),
    "mistral": (
        MISTRAL,
        TALK,
        "<s>[INST] one? [/INST][+ two </s>+][INST] and? [/INST][+ three</s>+]",
    ),
    "markers": (
        MARKED,
        TALK,
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n[+two <|im_end|>+]\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[+three<|im_end|>+]\n",
    ),
    "qwen 2.5": (
        QWEN_25,
        [
            user("a"),
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "b"},
            assistant("c"),
        ],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[+f()<|im_end|>\n+]<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n[+c<|im_end|>\n+]",
    ),
    "qwen 3": (
        QWEN_3,
        THOUGHT,
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[+<think>\nb\n</think>\n\nc<|im_end|>\n+]"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[+<think>\n\n</think>\n\ne<|im_end|>\n+]",
    ),
}


def test_a_template_near_a_known_one_is_left_as_it_is(tokenizer):
    """The change of Qwen3's template would not compile in one whose conditions are nested otherwise."""
    near = QWEN_3.replace("{%- endif %}", "{%- endif %}{%- if true %}", 1)
    assert training_form(near, lambda changed, template: False) == (near, None)


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


@pytest.mark.parametrize("name", CASES)
def test_the_trained_tokens_are_the_assistants(tokenizer, name):
    template, messages, expected = CASES[name]
    assert rendered(tokenizer, template, {"messages": messages}) == expected


CALLS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, MARKED, QWEN_25, CALLS])
def test_parts_of_text_are_the_text(tokenizer, template):
    parts = [
        {
            **message,
            "content": [
                {"type": "text", "text": piece}
                for piece in (message["content"][:1], message["content"][1:])
            ],
        }
        for message in TALK
    ]
    plain = rendered(tokenizer, template, {"messages": TALK})
    assert rendered(tokenizer, template, {"messages": parts}) == plain
    prompt = ChatTemplate(tokenizer, template).prompt
    assert prompt(parts[:3]) == prompt(TALK[:3])


def test_fields_that_nothing_reads_are_named(tokenizer):
    record = {
        "messages": [{**user("a"), "name": "x"}, {**assistant("b"), "reasoning": "y"}],
        "tool": [],
        "id": 1,
    }
    chat = read_chat(Document("a.jsonl", 1, json.dumps(record).encode()))
    assert ChatTemplate(tokenizer).unread(chat) == {
        "tool",
        "id",
        "name of messages",
        "reasoning of messages",
    }
    reads = CHATML + "{# name reasoning_content #}"
    assert ChatTemplate(tokenizer, reads).unread(chat) == {"tool", "id"}
    note = unread_note({"id", "tool", "completions"})
    assert note == (
        "note: fields of chats that nothing reads: 'completions' (did you mean completion?), 'id', 'tool' (did you mean tools?)"
    )
    assert unread_note(set()) == ""


def test_of_a_prompt_and_a_completion_the_completion_is_trained(tokenizer):
    assert rendered(tokenizer, None, {"prompt": "2+2=", "completion": "4"}) == "2+2=[+4</s>+]"
    assert rendered(tokenizer, None, {"prompt": "2+2=", "completion": "4</s>"}) == "2+2=[+4</s>+]"
    split = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert rendered(tokenizer, None, split).count("[+") == 1 and rendered(
        tokenizer, None, split
    ).endswith("[+three<|im_end|>\n+]")
    several = rendered(tokenizer, None, {"prompt": TALK[:1], "completion": TALK[1:]})
    assert several == CASES["chatml"][2], "a question in a completion is not trained"


@pytest.mark.parametrize(
    "template, messages, reason",
    [
        (
            ENDLESS,
            TALK,
            "does not end a turn of the assistant with a special token that is trained",
        ),
        (
            CHATML + "{% generation %}{% endgeneration %}",
            TALK,
            "a.jsonl:1: the template renders no token of the assistant",
        ),
        (
            MISTRAL,
            [{"role": "system", "content": "x"}, *TALK],
            r"cannot render it \(TemplateError: only user and assistant\)",
        ),
        ("{% if %}", TALK, r"cannot render it \(TemplateSyntaxError: "),
    ],
)
def test_what_cannot_be_masked_is_refused(tokenizer, template, messages, reason):
    with pytest.raises(ValueError, match=reason):
        rendered(tokenizer, template, {"messages": messages})


def test_texts_of_any_kind_are_printed_without_commands_for_the_terminal(tokenizer):
    ids = np.array(tokenizer.encode("a\x1b[2Jb" + "x" * 1000), np.int32)
    text = decode_trained(signed(ids, np.arange(len(ids)) < 3), tokenizer.decode, colour=True)
    assert (
        text.startswith("\033[32ma\N{REPLACEMENT CHARACTER}[\033[0m2Jbx")
        and " ... " in text
        and len(text) < 700
    )


# The command ---------------------------------------------------------------------------------------------------------------------

GOOD = {"messages": TALK}


def signed_chats(files: ChatFiles) -> list[np.ndarray]:
    chats = [files.get(i).astype(np.int32) for i in range(len(files))]
    return [signed(chat, files.trained(i, len(chat))) for i, chat in enumerate(chats)]


def test_preprocess_writes_chats_and_which_tokens_are_trained(folder, tokenizer, tmp_path, capsys):
    records = [
        {"messages": [user(f"q{i}" * (i % 7)), assistant(f"a{i}" * (1 + i % 5))]}
        for i in range(200)
    ]
    write_lines(tmp_path / "in.jsonl", *records)
    assert preprocess(folder, tmp_path / "in.jsonl", tmp_path / "one", "--keep-order") == 0
    files = ChatFiles(tmp_path / "one")
    template = ChatTemplate(tokenizer)
    expected = [template.encode(Chat(record["messages"])) for record in records]
    assert all(map(np.array_equal, signed_chats(files), expected))
    trained = sum(int((tokens < 0).sum()) for tokens in expected)
    assert files.count_trained(0, files.sequence_lengths).sum() == trained
    said = capsys.readouterr().out
    assert (
        f"200 chats, {sum(map(len, expected))} tokens, {trained} of them trained" in said
        and "train --sft --data-path" in said
    )
    assert (
        said.count("--- chat ") == 10
        and "<|im_start|>assistant\n[+a0<|im_end|>\n+]" in said
        and "turn by turn" in said
    )
    for workers in "12":  # shuffled: the same in every way, each chat with its own mask
        assert (
            preprocess(
                folder, tmp_path / "in.jsonl", tmp_path / f"w{workers}", "--workers", workers
            )
            == 0
        )
    for suffix in (".bin", ".idx", ".mask", ".tokenizer.json"):
        assert (tmp_path / f"w1{suffix}").read_bytes() == (tmp_path / f"w2{suffix}").read_bytes()
    shuffled = [tokens.tolist() for tokens in signed_chats(ChatFiles(tmp_path / "w1"))]
    in_order = [tokens.tolist() for tokens in expected]
    assert shuffled != in_order and sorted(shuffled) == sorted(in_order)


def test_a_chat_that_cannot_be_read_is_left_out_on_request(folder, tmp_path, capsys):
    bad = {"messages": [user("a")]}
    write_lines(tmp_path / "in.jsonl", GOOD, bad, {**GOOD, "tool": 1}, "nothing")
    assert preprocess(folder, tmp_path / "in.jsonl", tmp_path / "o") == 2
    assert "in.jsonl:2: messages has no message of the assistant" in (
        said := capsys.readouterr().err
    )
    assert "--skip-invalid leaves such chats out" in said and said.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]
    for workers in "12":
        prefix = tmp_path / f"o{workers}"
        more = ["--skip-invalid", "--workers", workers]
        assert preprocess(folder, tmp_path / "in.jsonl", prefix, *more) == 0
        said = capsys.readouterr().err
        assert (
            "--skip-invalid left out 2 chats (" in said and "in.jsonl:4: not a line of JSON" in said
        )
        assert "nothing reads: 'tool' (did you mean tools?)" in said and len(ChatFiles(prefix)) == 2


def test_other_mistakes_of_preprocess(folder, tmp_path, capsys):
    chats = write_lines(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "text.txt").write_text("words")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((folder / name).read_bytes())
    for more, reason in (
        (("--input", str(tmp_path / "text.txt")), "is plain text, and chats are JSON lines"),
        (
            ("--tokenizer-model", str(bare)),
            "has no chat template: pass one as --chat-template FILE",
        ),
        (("--chat-template", "missing.jinja"), "--chat-template missing.jinja: cannot be read"),
        (("--append-eod",), "--append-eod and --json-keys do not go with --chat"),
        (
            ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
            "--chat needs a tokenizer with a chat template",
        ),
    ):
        assert preprocess(folder, chats, tmp_path / "out", *more) == 2
        said = capsys.readouterr().err.strip()
        assert reason in said and len(said.splitlines()) == 1, more
    assert not list(tmp_path.glob("out*"))


# The three files -----------------------------------------------------------------------------------------------------------------


def write_masks(prefix: Path, masks: list[list[bool]]) -> ChatFiles:
    """Write chats with these trained tokens."""
    with ChatWriter(prefix, "<u2") as writer:
        for mask in masks:
            writer.add_document(signed(np.arange(len(mask)), np.array(mask)))
    return ChatFiles(prefix)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=20))
@settings(max_examples=50)
def test_masks_are_read_as_they_were_written(tmp_path_factory, masks):
    prefix = tmp_path_factory.mktemp("chats") / "c"
    files = write_masks(prefix, masks)
    written = [unsigned(chat) for chat in signed_chats(files)]
    assert [trained.tolist() for _, trained in written] == masks
    assert [ids.tolist() for ids, _ in written] == [[*range(len(mask))] for mask in masks]
    assert os.path.getsize(f"{prefix}.mask") == 36 + -(-sum(map(len, masks)) // 8)
    counted = files.count_trained(0, np.array([*map(len, masks)]))
    assert counted.sum() == sum(sum(mask[1:]) for mask in masks)


def test_a_mask_that_does_not_fit_is_refused(tmp_path):
    write_chats(tmp_path / "a", [9, 8])
    write_chats(tmp_path / "longer", [9, 9])
    write_chats(tmp_path / "lengths", [8, 9])
    write_chats(tmp_path / "tokens", [9, 8], token=6)
    good = (tmp_path / "a.mask").read_bytes()
    for content, reason in (
        (
            (tmp_path / "longer.mask").read_bytes(),
            r"it is the mask of 18 tokens, and .*a\.bin has 17",
        ),
        (
            (tmp_path / "lengths.mask").read_bytes(),
            r"it belongs to another .*a\.bin of as many tokens",
        ),
        (
            (tmp_path / "tokens.mask").read_bytes(),
            r"it belongs to another .*a\.bin of as many tokens",
        ),
        (good[:-1], "2 bytes of bits"),
        (good[:-1] + b"\xff", "damaged"),
        (good[:10], "not a mask"),
        (b"", "not a mask"),
        (good[:8] + b"\2" + good[9:], "version 2, and version 1 is known"),
    ):
        (tmp_path / "a.mask").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.mask: .*{reason}"):
            ChatFiles(tmp_path / "a")
    (tmp_path / "a.mask").unlink()
    with pytest.raises(ValueError, match=r"a\.mask: cannot be read .* preprocess --chat writes"):
        ChatFiles(tmp_path / "a")


def test_chats_are_not_read_as_pretraining_data(tmp_path):
    """Such a run would train the user's turns."""
    write_chats(tmp_path / "a", [9, 8, 7])
    with pytest.raises(
        ValueError,
        match=r"a\.mask says which tokens .* without --sft trains all of them: pass --sft",
    ):
        build_datasets([str(tmp_path / "a")], "100,0,0", (1, 0, 0), Builder(8, 1))
    (tmp_path / "a.mask").unlink()
    assert build_datasets([str(tmp_path / "a")], "100,0,0", (1, 0, 0), Builder(8, 1))[0] is not None


@pytest.mark.parametrize("renamed", range(3))
def test_files_of_a_killed_writer_do_not_look_whole(tmp_path, monkeypatch, renamed):
    write_chats(tmp_path / "a", [9, 8])
    replace = os.replace
    done = []

    def killed(source, target):
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_chats(tmp_path / "a", [7, 6])
    with pytest.raises(ValueError, match="cannot be read"):
        IndexedDataset(tmp_path / "a")
    assert not list(tmp_path.glob("*.tmp*"))


# Packing -------------------------------------------------------------------------------------------------------------------------


def fitted(lengths, size: int) -> list[int]:
    """Return the room left in each sample after best fit decreasing, chat by chat."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(size)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return sorted(rooms)


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            st.just(size), st.lists(st.integers(1, size), min_size=1, max_size=80)
        )
    )
)
@settings(max_examples=300)
def test_packing_is_best_fit_decreasing(case):
    size, lengths = case
    lengths = -np.sort(-np.array(lengths))
    packing = Packing.of(lengths, size)
    samples = [packing.of_sample(i).tolist() for i in range(len(packing))]
    assert sorted(sum(samples, [])) == [*range(len(lengths))], "every chat once"
    assert sorted(size - int(lengths[sample].sum()) for sample in samples) == fitted(lengths, size)


@given(
    st.lists(st.integers(2, 17), min_size=1, max_size=30).filter(lambda lengths: max(lengths) > 2),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_samples_hold_whole_chats_and_each_epoch_has_every_chat_once(
    tmp_path_factory, lengths, seed
):
    files = write_chats(tmp_path_factory.mktemp("chats") / "c", lengths)
    data = ChatDataset(files, "train", range(len(lengths)), 1, DatasetConfig(16, seed))
    again = ChatDataset(files, "train", range(len(lengths)), 3 * len(data), DatasetConfig(16, seed))
    assert again.num_epochs == 3 and len(again) == 3 * len(data)
    counted = 0
    for epoch in range(3):
        chats: list[int] = []
        for i in range(epoch * len(data), (epoch + 1) * len(data)):
            tokens, marks = again[i]
            own = again.chats_of(i)
            expected = np.concatenate([files.get(chat) for chat in own])
            assert len(tokens) == 17 and tokens[: len(expected)].tolist() == expected.tolist()
            assert (
                not (tokens[len(expected) :] - PADDING).any()
                and not (marks[len(expected) :] & COUNTED).any()
            )
            begins = np.cumsum([0, *(lengths[chat] for chat in own)])
            assert np.flatnonzero(marks & FIRST).tolist() == [
                begin for begin in begins.tolist() if begin < 17
            ]
            places = [
                marks[begin : begin + lengths[chat]] & COUNTED for begin, chat in zip(begins, own)
            ]
            assert all(
                place.tolist() == [0, 0, *[1] * len(place)][: len(place)] for place in places
            )
            chats += own
            counted += int((marks & COUNTED).sum())
        assert sorted(chats) == [*range(len(lengths))]
    assert counted == 3 * data.num_trained == 3 * sum(length - 2 for length in lengths)
    fresh = ChatDataset(files, "train", range(len(lengths)), 3 * len(data), DatasetConfig(16, seed))
    last = len(fresh) - 1
    assert np.array_equal(fresh[last], again[last]) and np.array_equal(fresh[0], data[0]), (
        "of the seed and the number alone"
    )


def test_chats_that_are_too_long(tmp_path):
    files = write_chats(tmp_path / "c", [5, 30, 17, 40])
    with pytest.raises(
        ValueError,
        match=r"train data of .*c: chat 1, counted from 0, has 30 tokens, and a sample takes "
        r"--seq-length 16 \+ 1; 2 of 3 chats are too long, the longest has 40: .*--sft-truncate",
    ):
        ChatDataset(files, "train", range(1, 4), 1, DatasetConfig(16, 1))
    data = ChatDataset(files, "train", range(1, 4), 1, DatasetConfig(16, 1), truncate=True)
    assert (
        data.num_tokens == 51 and len(data) == 3 and data.chats_cut == 2 and data.num_trained == 45
    )
    assert (
        sorted(data[i][0, 0] for i in range(3)) == [10, 40, 57] and (np.diff(data[0][0]) == 1).all()
    )
    assert packing_lines(data) == [
        f"train data of {tmp_path}/c: 3 chats of 51 tokens in 3 samples of 17 an epoch: 100.0% is not "
        "padding, 88.2% counts in the loss; --sft-truncate cut 2 chats"
    ]
    with pytest.raises(ValueError, match="it has no chats"):
        ChatDataset(files, "valid", range(0), 1, DatasetConfig(16, 1))


def test_chats_without_a_trained_token_are_counted_and_refused_if_they_are_all(tmp_path):
    late = [False] * 20 + [True] * 5
    early = [False] * 5 + [True] * 5
    first = [True] + [False] * 5  # nothing predicts the first token
    files = write_masks(tmp_path / "c", [late, early, late, first])
    data = ChatDataset(files, "train", range(4), 1, DatasetConfig(16, 1), truncate=True)
    assert data.chats_lost == 3 and data.num_trained == 5
    said = lost_lines(data, None)
    assert len(said) == 1 and "warning: train data of" in said[0]
    assert "3 of 4 chats have no trained token in their first 17 tokens" in said[0]
    assert "raise --seq-length" in said[0] and lost_lines(None) == []
    whole = ChatDataset(files, "train", range(4), 1, DatasetConfig(32, 1))
    assert whole.chats_lost == 1 and "--seq-length" not in lost_lines(whole)[0]
    with pytest.raises(
        ValueError,
        match=r"valid data of .*c: none of its 17 tokens is trained: --sft-truncate cut the answers of 1 of 1 chats away: "
        "raise --seq-length, which is 16",
    ):
        ChatDataset(files, "valid", range(2, 3), 1, DatasetConfig(16, 1), truncate=True)
    with pytest.raises(
        ValueError, match=r"none of its 6 tokens is trained, as its \.mask file says"
    ):
        ChatDataset(files, "train", range(3, 4), 1, DatasetConfig(16, 1))


def test_a_run_reads_blends_and_splits_of_chats(tmp_path):
    for name, lengths in (("a", [5, 6, 7] * 10), ("b", [9] * 20)):
        write_chats(tmp_path / name, lengths, token=5 if name == "a" else 1000)
    paths = ["3", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    train, valid, _ = build_datasets(
        paths, "80,20,0", (60, 4, 0), Builder(16, 1, vocab_size=2000, cuts_chats=False)
    )
    first = [train[i] for i in range(60)]
    assert (
        all(sample.shape == (2, 17) for sample in first)
        and sum(sample[0, 0] >= 1000 for sample in first) == 15
    )
    assert len(packing_lines(train)) == 2 and valid[0].shape == (2, 17)
    held_out = {
        chat for part in valid.datasets for i in range(len(part)) for chat in part.chats_of(i)
    }
    trained = {
        chat for i in range(len(train.datasets[0])) for chat in train.datasets[0].chats_of(i)
    }
    assert trained == {*range(24)} and held_out >= {*range(24, 30)}
    with pytest.raises(ValueError, match=r"a\.bin: token id .* is outside the vocabulary of 20"):
        build_datasets(
            paths, "100,0,0", (60, 0, 0), Builder(16, 1, vocab_size=20, cuts_chats=False)
        )


def test_flags_and_the_plan(tmp_path, tokenizer):
    write_chats(tmp_path / "a", [5, 6, 7] * 10)
    assert any(
        "--sft-truncate" in note and "--sft" in note
        for note in parse(["--recipe", "demo", "--sft-truncate"]).notes
    )
    values = {
        "sft": True,
        "data_path": (str(tmp_path / "a"),),
        "split": "100,0,0",
        "vocab_size": 1000,
    }
    assert "30 chats of 180 tokens in 2 samples of 129 an epoch: 69.8% is not padding" in report(
        make_run("demo", values), 1
    )
    with pytest.raises(ValueError, match="chat 1, counted from 0, has 6 tokens"):
        report(make_run("demo", {**values, "seq_length": 4}), 1)
