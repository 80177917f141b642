"""Make a small set of chats from this project's documentation, and a tokenizer with a chat template, for docs/chat.md.

    python -m tools.flag_chats FOLDER

FOLDER/train.jsonl and held_out.jsonl ask in different words what the flags of docs/flags.md mean. FOLDER/tokenizer is a byte-level
BPE trained on the documentation, in Hugging Face's form.
"""

import json
import re
import sys
from pathlib import Path

import tokenizers

DOCS = Path(__file__).resolve().parents[1] / "docs"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TRAINED = ("What does {} mean?", "Explain {}.", "Which flag means: {answer}?")
HELD_OUT = ("What is {}?",)


def chat(question: str, flag: str, meaning: str) -> dict:
    asked = question.format(flag, answer=meaning)
    answer = flag if "{answer}" in question else f"{flag}: {meaning}"
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    }


def write(folder: Path) -> str:
    """Write the chats and the tokenizer; return a line that names them."""
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    rows = re.findall(
        r"^\| `(--[a-z0-9-]+)`.*\| ([^|]{20,200}) \|$",
        (DOCS / "flags.md").read_text(),
        re.MULTILINE,
    )
    for name, questions in (("train", TRAINED), ("held_out", HELD_OUT)):
        chats = [chat(question, *row) for row in rows for question in questions]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    kind = tokenizers.ByteLevelBPETokenizer()
    kind.train(
        sorted(map(str, DOCS.glob("*.md"))),
        vocab_size=1024,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    kind.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return (
        f"{len(rows)} flags: {folder}/train.jsonl, {folder}/held_out.jsonl and {folder}/tokenizer"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.flag_chats FOLDER")
    print(write(Path(sys.argv[1])))
