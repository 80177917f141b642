"""Strict YAML 1.2 reader: each mistake is a one-line ValueError.

ruamel.yaml refuses duplicate keys. Values follow YAML's core schema; a date is text.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar

from ..text.named_files import read_text
from ..text.optional_packages import optional_package
from .fields import check

LARGEST = 2**18  # bytes; ruamel.yaml reads about 100 KB per second
MAX_NODES = 10_000  # aliases in a few lines can expand to billions of nodes
TAG = "tag:yaml.org,2002:"
OCTAL = re.compile(r"[-+]?0_*[0-9][0-9_]*")  # in YAML 1.1, which Megatron-LM reads
CORE = ("null", "bool", "int", "float", "str", "seq", "map")


def read_yaml(path: str) -> dict[str, Any]:
    """Return the keys in the file of --yaml-cfg. Raises ValueError, with file and line."""
    where = f"--yaml-cfg {path}"
    ruamel = optional_package("ruamel.yaml", "yaml", where)
    text = read_text(path, "--yaml-cfg", largest=LARGEST)
    reader = ruamel.YAML(typ="safe", pure=True)
    reader.Constructor = _core_constructor(ruamel, where)
    try:
        top = reader.load(text)
    except ruamel.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"{where}: cannot be read: line {line}: the character #x{error.character:04x} is not "
            "allowed: remove it"
        ) from None
    except ruamel.error.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reasons = ": ".join(filter(None, (error.context, error.problem)))
        raise ValueError(
            f"{where}: cannot be read: line {mark.line + 1}: {reasons:.200}: correct the line"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{where}: cannot be read: brackets or sections are nested too deeply: write a key and a "
            "value on each line"
        ) from None
    except OverflowError as error:  # an escape beyond the last character
        raise ValueError(f"{where}: cannot be read: {error}: correct the line") from None
    check(
        isinstance(top, dict),
        f"{where}: it holds no keys: pass a file with lines such as `num_layers: 24`",
    )
    return dict(top)


def _core_constructor(ruamel: Any, where: str) -> type:
    """Return a constructor of the core schema's values, which names the line of a wrong value."""
    safe = ruamel.constructor.SafeConstructor

    class CoreConstructor(safe):  # type: ignore[misc, valid-type]
        yaml_constructors: ClassVar[dict[str | None, Any]] = {
            **{f"{TAG}{name}": safe.yaml_constructors[f"{TAG}{name}"] for name in CORE},
            f"{TAG}timestamp": safe.construct_yaml_str,
            None: safe.construct_undefined,
        }

        def construct_document(self, node: Any) -> Any:
            check(
                _count(node, {}) <= MAX_NODES,
                f"{where}: its aliases stand for more than {MAX_NODES} values: write the values out",
            )
            return super().construct_document(node)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            mistake = partial(ruamel.constructor.ConstructorError, problem_mark=node.start_mark)
            kind = node.tag.removeprefix(TAG)
            if kind == "int" and OCTAL.fullmatch(str(node.value)):
                raise mistake(problem=f"{node.value:.60} is octal in YAML 1.1, and decimal in 1.2")
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, OverflowError):
                raise mistake(problem=f"{node.value!r:.60} is no {kind}") from None

    return CoreConstructor


def _count(node: Any, counts: dict[int, int]) -> int:
    """Return a tree's nodes with aliases expanded; above MAX_NODES if it contains itself."""
    if id(node) not in counts:
        counts[id(node)] = MAX_NODES + 1  # while its children are counted
        children = node.value if isinstance(node.value, list) else []
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        counts[id(node)] = 1 + sum(_count(child, counts) for pair in pairs for child in pair)
    return counts[id(node)]
