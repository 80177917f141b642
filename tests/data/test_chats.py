"""Chats: the trained tokens of each kind of template, the command, and what is refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from fugaku_megatron.data.chat.chat_examples import decode_trained
from fugaku_megatron.data.chat.chat_files import ChatFiles, signed
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.data.chat.chats import Chat, read_chat, unread_note
from fugaku_megatron.data.chat.chats import user_turn as user
from fugaku_megatron.data.chat.training_forms import training_form
from fugaku_megatron.data.input.documents import Document
from tests.checks.chats import (
    CHATML,
    GOOD,
    TALK,
    assistant,
    preprocess,
    signed_chats,
    write_lines,
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
    assert files.count_trained(0, files.read_lengths(0, len(files))).sum() == trained
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
    (said,) = capsys.readouterr().err.splitlines()
    assert "in.jsonl:2: messages has no message of the assistant" in said
    assert "--skip-invalid leaves such chats out" in said
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
        (said,) = capsys.readouterr().err.splitlines()
        assert reason in said, more
    assert not list(tmp_path.glob("out*"))
