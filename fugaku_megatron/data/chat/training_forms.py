"""Changes of published chat templates for training, as trl makes them."""

from __future__ import annotations

import re
from collections.abc import Callable

# Templates without markers: the pattern of a part, and its replacement. All parts of a row must be in a template, once each.
# Qwen3's leaves out the assistant's reasoning in earlier turns, so that no prefix agrees with the whole; the changed template keeps
# it. Source: trl/chat_templates/qwen3_training.jinja.
TRAINING_FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "Qwen3": (
        (
            r"\{%- if loop\.index0 > ns\.last_query_index %\}.*?\{%- endif %\}\s*\{%- else %\}.*?\{%- endif %\}",
            r"{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}"
            r"{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}",
        ),
        (
            r"(\{\{- '<\|im_end\|>\\n' \}\})(\s*\{%- elif message\.role == \"tool\" %\})",
            r"\1{%- endgeneration %}\2",
        ),
    ),
}


def training_form(
    template: str, renders_alike: Callable[[str, str], bool]
) -> tuple[str, str | None]:
    """Return (template for training, its row in TRAINING_FORMS).

    renders_alike: True if both templates render a one-turn chat alike

    A template that only resembles a row stays unchanged.
    """
    for name, parts in TRAINING_FORMS.items():
        changed = template
        for pattern, instead in parts:
            changed, count = re.subn(pattern, instead, changed, flags=re.DOTALL)
            if count != 1:
                break
        else:
            if renders_alike(changed, template):
                return changed, name
    return template, None
