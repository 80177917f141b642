"""Chats without generation markers: the assistant's turns, compared with a reference that searches the text."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import tokenizers

from fugaku_megatron.data.chat import template_process
from fugaku_megatron.data.chat.chat_examples import decode_trained
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.data.chat.chats import Chat, chat_of
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.checks.chat_turns import (
    CHATML_SHAPE,
    CHATS,
    OPENED_SHAPE,
    TOOLS,
    Shape,
    calls,
    expected_text,
)
from tests.checks.chats import CHATML, assistant, user
from tests.checks.tokenizers import byte_level, save

pytestmark = pytest.mark.unit

TOKENS = re.compile(
    r"<[|｜][^<>{}'\"\s]+?[|｜]>|</?think>|</?tool_call>|<(?:start|end)_of_turn>|<end_of_utterance>"
    r"|<\|?(?:turn|channel|tool_call|tool_response)\|?>|\[/?INST\]|</?s>"
)
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, and not special
FORM = r"pass --chat-template FILE, the template with {% generation %} .* trl's chat_templates"


def tokenizer_of(folder: Path, text: str, eos: str = "</s>") -> HuggingFaceTokenizer:
    """Write a byte-level tokenizer with the tokens that a template names."""
    named = [token for token in TOKENS.findall(text) if token not in ORDINARY]
    kind = byte_level(["user assistant tool"], [*dict.fromkeys(["<s>", eos, *named])], 400)
    kind.add_tokens([tokenizers.AddedToken(token, special=False) for token in ORDINARY])
    save(kind, folder, bos_token="<s>", eos_token=eos)
    return HuggingFaceTokenizer(folder)


def record(messages: list[dict]) -> dict:
    has_calls = any(message.get("tool_calls") for message in messages)
    return {"messages": messages, **({"tools": TOOLS} if has_calls else {})}


def encoded(template: ChatTemplate, tokenizer: HuggingFaceTokenizer, messages: list[dict]) -> str:
    tokens = template.encode(chat_of(record(messages), "chat"))
    return decode_trained(tokens, tokenizer.decode, colour=False, longest=10**6)


def renderer(template: ChatTemplate, messages: list[dict]):
    """Return a function that renders as transformers, with contents of the kind the template takes."""
    tools = record(messages).get("tools")

    def render(changed: list[dict]) -> str:
        chat = template._as_taken(Chat(changed, tools=tools))
        text = template._library.apply_chat_template(
            chat.messages, tools=tools, chat_template=template._for_training, tokenize=False
        )
        return str(text)

    return render


HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
OTHER = "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALL = "{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}"
CALLS = "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}"
LAST = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
# Structures of published templates in a few lines: (template, the text around its turns, chats that are refused).
KINDS: dict[str, tuple[str, Shape, set[str]]] = {
    "calls after the text": (
        HEAD
        + "{{ '<|im_start|>assistant\n' + (m.content or '') }}"
        + CALLS
        + "{{ '<|im_end|>\n' }}"
        + OTHER
        + PROMPT,
        CHATML_SHAPE,
        {"a thought alone"},
    ),
    "calls and thoughts before the text": (
        HEAD
        + "{{ '<|im_start|>assistant\n' }}{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
        + CALLS
        + "{{ (m.content or '') + '<|im_end|>\n' }}"
        + OTHER
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
        CHATML_SHAPE,
        set(),
    ),
    "an opened thought, and thoughts of the last question alone": (
        LAST
        + HEAD
        + "{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
        "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > last.user %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
        "{% if m.tool_calls %}{% if text %}{{ '\n\n' }}{% endif %}{% for c in m.tool_calls %}"
        + CALL
        + "{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}"
        + OTHER
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        OPENED_SHAPE,
        set(),
    ),
    "a header and a stop without lines": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' + (m.content or '') | trim }}"
        "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}{{ '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}",
        Shape.of("<|start|>assistant<|end|>\n\n", "<|eot|>"),
        {"a thought alone"},
    ),
    "an end of the text after the last turn": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
        "{# <|user|> <|assistant|> #}",
        Shape.of("<|assistant|>\n", "<|end|>\n"),
        {name for name in CHATS if "call" in name and name != "a call with a text"}
        | {"a thought alone"},
    ),
    "channels, and another stop of the last turn": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
        "{{ '<|start|>assistant to=' + m.tool_calls[0].function.name"
        " + '<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}{% elif loop.last and not add_generation_prompt %}"
        "{% if m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        Shape.of("<|start|>assistant", "<|end|>", "<|call|>"),
        set(),
    ),
    "a prompt without a header": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
        "{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}",
        Shape(r"\[/INST\]|(?<=</s>)(?=[^\[])", "</s>"),
        {name for name in CHATS if "call" in name}
        | {"a system message", "a thought alone", "the assistant first"},
    ),
    "tools before the last question": (
        LAST
        + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == last.user %}"
        "{{ '<|tools|>' + (tools | tojson) }}"
        "{% endif %}{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + (m.content or '') }}"
        + CALLS
        + "{{ eos_token }}{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}",
        Shape(r"\[/INST\]|(?<=42|43)(?!<)|(?<=</s>)(?=[^\[<])", "</s>"),
        {"a thought alone", "the assistant first"},
    ),
    "an answer of a tool inside a turn": (
        "{% set turn = namespace(open=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if not turn.open %}{{ '<|turn|>assistant\n' }}{% endif %}"
        + CALLS
        + "{{ m.content or '' }}"
        "{% set turn.open = (m.tool_calls or []) | length > 0 %}{{ '<|response|>' if turn.open else '<|stop|>\n' }}"
        "{% elif m.role == 'tool' %}{{ m.content + '<|answered|>' }}"
        "{% else %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|stop|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not turn.open %}{{ '<|turn|>assistant\n' }}{% endif %}",
        Shape(
            r"<\|turn\|>assistant\n|4[23]<\|answered\|>(?!43)",
            r"<\|stop\|>\n|<\|response\|>",
        ),
        {"a thought alone"},
    ),
    "parts alone": (
        "{% for m in messages %}{{ m.role | capitalize + ':' }}{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ ' ' + part.text }}{% endif %}{% endfor %}{{ '<end_of_utterance>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        Shape.of("Assistant:", "<end_of_utterance>\n"),
        {name for name in CHATS if "call" in name and name != "a call with a text"}
        | {"a thought alone"},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_trained_is_the_assistants_turns(tmp_path, name):
    text, shape, refused = KINDS[name]
    tokenizer = tokenizer_of(tmp_path, text)
    template = ChatTemplate(tokenizer, text)
    found = set()
    for chat, messages in CHATS.items():
        try:
            trained = encoded(template, tokenizer, messages)
        except ValueError as error:
            assert re.search("--chat-template FILE|cannot render it", str(error)), chat
            found.add(chat)
            continue
        assert trained == expected_text(renderer(template, messages), messages, shape), chat
    assert found == refused


# The generation prompt opens a thought that an answer without one closes at once, and turns that the next role ends.
CLOSED = (
    HEAD
    + "{{ '<|im_start|>assistant\n' }}GENERATION{{ '<think></think>' + m.content + '<|im_end|>' }}END{{ '\n' }}"
    + OTHER
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
STOPLESS = (
    "{% for m in messages %}{% if m.role != 'assistant' or not loop.last %}{{ '<|' + m.role + '|>' }}{% endif %}"
    "{% if m.role == 'assistant' %}GENERATION{{ m.reasoning_content or '' }}{{ m.content }}"
    + CALLS
    + "{{ STOP }}END{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(
    "text, stop",
    [(CLOSED, ""), (STOPLESS, "'<|user|>' if not loop.last else '<|stop|>'")],
    ids=["a closed thought", "no stop"],
)
def test_a_refused_template_is_taken_with_generation_markers(tmp_path, text, stop):
    markers = (("GENERATION", "{% generation %}"), ("END", "{% endgeneration %}"), ("STOP", stop))
    original = text
    form = text
    for name, marker in markers:
        original = original.replace(name, "''" if name == "STOP" else "")
        form = form.replace(name, marker)
    tokenizer = tokenizer_of(tmp_path, f"{form}<|user|><|assistant|>")
    template = ChatTemplate(tokenizer, original)
    talk = CHATS["two turns"]
    talks = [talk, talk[:2]]
    if stop:  # an added token at the end of an answer is no end of its turn
        talks += [[talk[0], calls("", "look_up")], [talk[0], assistant("a </think>")]]
    for messages in talks:
        with pytest.raises(ValueError, match=FORM) as refused:
            template.encode(chat_of(record(messages), "chat"))
        assert "\n" not in str(refused.value)
    assert "three" in encoded(ChatTemplate(tokenizer, form), tokenizer, talk).split("[+")[2]


def test_of_a_completion_that_the_prompt_does_not_begin_the_turns_are_trained(tmp_path):
    text, _, _ = KINDS["calls and thoughts before the text"]
    tokenizer = tokenizer_of(tmp_path, text)
    messages = CHATS["thoughts"]
    chat = chat_of({"prompt": messages[:3], "completion": messages[3:]}, "chat")
    shown = decode_trained(ChatTemplate(tokenizer, text).encode(chat), tokenizer.decode, False)
    assert shown.endswith("assistant\n[+<think>\nwell\n</think>\n\nthree<|im_end|>\n+]")
    assert shown.count("[+") == 1


def test_a_long_chat_takes_few_renderings(tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tmp_path, CHATML)
    template = ChatTemplate(tokenizer, CHATML)
    template.encode(Chat(CHATS["two turns"]))
    render = ChatTemplate._rendered
    count = 0

    def counted(*arguments, **options):
        nonlocal count
        count += 1
        return render(*arguments, **options)

    monkeypatch.setattr(ChatTemplate, "_rendered", counted)
    messages = [m for i in range(200) for m in (user(f"ask {i}"), assistant(f"say {i}"))]
    shown = encoded(template, tokenizer, messages)
    assert shown.count("[+") == 200 and count < 20
    assert all(f"\n[+say {i}<|im_end|>\n+]" in shown for i in range(200))


def test_a_limit_ends_the_search_for_turns(tmp_path, monkeypatch):
    """Also of a template that renders the chat and not its beginnings."""
    text = CHATML + "{% if add_generation_prompt %}" + "{% for i in range(99999) %}" * 2
    text += "{% endfor %}" * 2 + "{% endif %}"
    template = ChatTemplate(tokenizer_of(tmp_path, text), text)
    monkeypatch.setattr(template_process, "SECONDS", 0.2)
    with pytest.raises(template_process.TemplateLimit, match="did not end within 0.2 s"):
        template.encode(chat_of({"messages": CHATS["one turn"]}, "chat"))


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_call_that_is_not_rendered_is_refused_if_the_answer_is_empty(tmp_path, content):
    dropping = CHATML.replace("message['content']", "(message['content'] or '')")
    template = ChatTemplate(tokenizer_of(tmp_path, dropping), dropping)
    messages = [user("one?"), calls(content, "look_up"), assistant("it is 42")]
    with pytest.raises(ValueError, match="message 2 has tool calls and no content"):
        template.encode(chat_of({"messages": messages}, "chat"))


@pytest.mark.parametrize("kind", ["trimmed offsets", "in Python"])
def test_tokenizers_with_other_offsets_mark_the_same_tokens(tmp_path, monkeypatch, kind):
    """Trimmed offsets leave out white space at both ends of a token; tokenizers in Python have none."""
    tokenizer = tokenizer_of(tmp_path, CHATML)
    template = ChatTemplate(tokenizer, CHATML)
    talks = [talk for talk in CHATS.values() if all(m.get("content") for m in talk)]
    expected = [encoded(template, tokenizer, talk) for talk in talks]
    if kind == "in Python":
        monkeypatch.setattr(type(tokenizer.library), "is_fast", False)
    else:
        trimmed = tokenizers.processors.ByteLevel(trim_offsets=True)
        tokenizer.library.backend_tokenizer.post_processor = trimmed
    assert [encoded(template, tokenizer, talk) for talk in talks] == expected


# Published templates -------------------------------------------------------------------------------------------------------------

TRL = importlib.util.find_spec("trl")
PUBLISHED = Path(TRL.origin).parent / "chat_templates" if TRL and TRL.origin else None
HEADER_ID = "<|start_header_id|>assistant<|end_header_id|>\n\n"
GEMMA = Shape.of("<start_of_turn>model\n", "<end_of_turn>\n")
GEMMA_4 = Shape(
    r"<\|turn>model\n|<tool_response\|>(?!<\|tool_response>|<\|turn>model)",
    r"<turn\|>\n|<\|tool_response>",
)
UTTERANCE = Shape.of("Assistant:", "<end_of_utterance>\n")
COHERE = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
DEEPSEEK = ("<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
EOS = {"deepseek": DEEPSEEK[1], "phi3": "<|endoftext|>"}  # by the beginning of a name
SHAPES: dict[str, Shape | None] = {
    **dict.fromkeys(
        "lfm2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2 qwen2_5 qwen2_5_vl qwen3 qwen3_instruct_2507 qwen3_vl".split(),
        CHATML_SHAPE,
    ),
    **dict.fromkeys(
        "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5".split(), GEMMA_4
    ),
    # Every chat is refused.
    **dict.fromkeys(
        "glm4moe nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra".split()
    ),
    "cohere": Shape.of(COHERE, "<|END_OF_TURN_TOKEN|>"),
    "cohere2": Shape.of(f"{COHERE}<|START_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": Shape.of(*DEEPSEEK, opened="<think>\n"),
    "deepseekv3": Shape.of(*DEEPSEEK),
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "gptoss": Shape.of("<|start|>assistant", "<|end|>", "<|call|>"),
    "idefics3": UTTERANCE,
    "llama3": Shape.of(HEADER_ID, "<|eot_id|>"),
    "llama3_1": Shape.of(HEADER_ID, "<|eot_id|>", "<|eom_id|>"),
    "llama3_2": Shape.of(HEADER_ID, "<|eot_id|>", "<|eom_id|>"),
    "llava_next": Shape(r"\[/INST\]|(?<=</s> )(?=[^\[])", "</s> "),
    "muse_glimmer": Shape.of("<|start|>assistant", "<|eot|>"),
    "phi3": Shape.of("<|assistant|>\n", "<|end|>\n"),
    "phi3_5": Shape.of("<|assistant|>\n", "<|end|>\n"),
    "qwen3_5_nothink": Shape.of(
        "<|im_start|>assistant\n", "<|im_end|>\n", opened="<think>\n\n</think>\n\n"
    ),
    "qwen3_5_think": OPENED_SHAPE,
    "qwen3_6": OPENED_SHAPE,
    "qwen3_8": OPENED_SHAPE,
    "smolvlm": UTTERANCE,
}
# Where trl's form of a template trains more or less, as docs/chat.md says: HEADERS are trained too.
HEADERS = {
    "deepseek_r1_distill": DEEPSEEK[0],
    "deepseekv3": DEEPSEEK[0],
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "qwen2_5": "\n",
}
OPENED = ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")  # keeps and trains thoughts
THOUGHT = r"\[\+|\+\]|<think>.*?</think>\n\n"
DIFFERENT = {  # chats in which the rendered text or the end of a turn differs
    "deepseek_r1_distill": ("in the text",),
    "diffusion_gemma": ("call",),
    "llava_next": ("two answers",),  # the space between them
    **dict.fromkeys(OPENED, ("thought",)),
}
UNTAKEN = {("diffusion_gemma", "a call with a text")}  # the form trains a part without a stop
SPACE = ("llava_next",)  # leaves out the space after the stop


def published(folder: Path, name: str) -> tuple[HuggingFaceTokenizer, str, str | None]:
    """Return a tokenizer with the tokens of a template, the template, and its form for training."""
    assert PUBLISHED
    form = PUBLISHED / f"{name}_training.jinja"
    text = (PUBLISHED / f"{name}.jinja").read_text()
    training = form.read_text() if form.exists() else None
    eos = next((EOS[start] for start in EOS if name.startswith(start)), "</s>")
    return tokenizer_of(folder, f"{text}{training}", eos), text, training


@pytest.mark.slow
@pytest.mark.skipif(PUBLISHED is None, reason="no trl: pip install -r requirements-trl.txt")
@pytest.mark.parametrize("name", SHAPES)
def test_published_templates_train_the_assistants_turns(tmp_path, name):
    """Or refuse the chat; if its turns are not found, the form for training takes it."""
    tokenizer, text, training = published(tmp_path, name)
    template = ChatTemplate(tokenizer, text)
    shape = SHAPES[name]
    equal = 0
    for chat, messages in CHATS.items():
        try:
            trained = encoded(template, tokenizer, messages)
        except ValueError as error:
            if re.search(FORM, str(error)) and training and (name, chat) not in UNTAKEN:
                assert "[+" in encoded(ChatTemplate(tokenizer, training), tokenizer, messages), chat
            else:
                assert re.search(
                    "does not render|cannot render|cannot be|does not follow", str(error)
                ), chat
            continue
        assert shape
        assert trained == expected_text(renderer(template, messages), messages, shape), chat
        equal += 1
    assert equal >= 12 if shape else equal == 0


@pytest.mark.slow
@pytest.mark.skipif(PUBLISHED is None, reason="no trl: pip install -r requirements-trl.txt")
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape])
def test_what_trl_trains_of_published_templates(tmp_path, name):
    """Equal, or different as docs/chat.md says."""
    tokenizer, text, training = published(tmp_path, name)
    if training is None:
        pytest.skip("trl has no form for training")
    ours = ChatTemplate(tokenizer, text)
    theirs = ChatTemplate(tokenizer, training)
    for chat, messages in CHATS.items():
        try:
            found = encoded(ours, tokenizer, messages)
            expected = encoded(theirs, tokenizer, messages)
        except ValueError:
            continue
        if header := HEADERS.get(name):
            found = found.replace(f"{header}[+", f"[+{header}").replace("+][+", "")
        if name in SPACE:
            found = found.replace(" +]", "+] ")
        if name in OPENED:
            found, expected = (
                re.sub(THOUGHT, "", each, flags=re.DOTALL) for each in (found, expected)
            )
        assert found == expected or any(part in chat for part in DIFFERENT.get(name, ("-",))), chat
