"""Strict YAML reader: each mistake is a one-line ValueError.

PyYAML silently accepts duplicate keys, reads 010 as 8 and 1:30 as 90, and raises errors of many
kinds, some without a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..text.named_files import read_text
from .fields import check

LARGEST = 2**18  # bytes; PyYAML reads about 250 KB per second
MAX_NODES = 10_000  # aliases in a few lines can expand to billions of nodes
YAML_TAG = "tag:yaml.org,2002:"
# Names of types, by tag.
SCALARS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "timestamp": "a date",
}
COLLECTIONS = {"map": "MappingNode", "seq": "SequenceNode"}
# Numbers with a surprising value in YAML 1.1: 010 is 8, and 1:30 is 90.
SURPRISING = re.compile(r"[-+]?0_*[0-9][0-9_]*|[^:]*:.*")


def read_yaml(path: str) -> dict[str, Any]:
    """Return the keys in the file of --yaml-cfg. Raises ValueError, with file and line."""
    where = f"--yaml-cfg {path}"
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"{where}: a package is missing: pip install PyYAML, or this package with its "
            "extra [yaml]"
        ) from None
    text = read_text(path, "--yaml-cfg", largest=LARGEST)
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _check_size(where, root)
        for node in _nodes(root):
            _check_node(where, loader, node)
        top: Any = None if root is None else loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"{where}: cannot be read: line {line}: the character #x{error.character:04x} is not "
            "allowed: remove it"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reasons = filter(None, (error.context, error.problem))
        raise ValueError(
            f"{where}: cannot be read: {_line(mark)}{': '.join(map(str, reasons))}: correct the line"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{where}: cannot be read: brackets or sections are nested too deeply: write a key and a "
            "value on each line"
        ) from None
    except OverflowError as error:  # an escape beyond the last character
        line = loader.line + 1
        raise ValueError(
            f"{where}: cannot be read: line {line}: {error}: correct the line"
        ) from None
    check(
        isinstance(top, dict),
        f"{where}: it holds no keys: pass a file with lines such as `num_layers: 24`",
    )
    return dict(top)


def _line(mark: Any) -> str:
    return "" if mark is None else f"line {mark.line + 1}: "


def _check_size(where: str, root: Any) -> None:
    """Raise ValueError above MAX_NODES nodes with aliases expanded."""
    counts: dict[int, int] = {}

    def count(node: Any) -> int:
        """Count a subtree's nodes; above MAX_NODES for a node that contains itself."""
        if id(node) not in counts:
            counts[id(node)] = MAX_NODES + 1  # while its children are counted
            counts[id(node)] = 1 + sum(map(count, _children(node)))
        return counts[id(node)]

    check(
        root is None or count(root) <= MAX_NODES,
        f"{where}: its aliases stand for more than {MAX_NODES} values: write the values out",
    )


def _children(node: Any) -> Iterator[Any]:
    for child in node.value if isinstance(node.value, list) else ():
        if isinstance(child, tuple):
            yield from child
        else:
            yield child


def _nodes(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting.extend(reversed(list(_children(node))))


def _check_node(where: str, loader: Any, node: Any) -> None:
    """Raise ValueError, with the line, if YAML misreads a value or a key."""
    begin = f"{where}: {_line(node.start_mark)}"
    kind = node.tag.removeprefix(YAML_TAG)
    is_scalar = isinstance(node.value, str)
    if is_scalar and kind in ("merge", "value"):
        return  # a key that PyYAML checks
    check(
        kind in SCALARS if is_scalar else type(node).__name__ == COLLECTIONS.get(kind),
        f"{begin}the tag {node.tag!r:.60} is not for this value: leave it out",
    )
    if is_scalar:
        try:
            value = str(loader.construct_object(node))
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            raise ValueError(
                f"{begin}{node.value!r:.60} is not {SCALARS[kind]}: correct it, or put text in quotes"
            ) from None
        if kind in ("int", "float") and SURPRISING.fullmatch(node.value):
            raise ValueError(
                f"{begin}{node.value:.60} is {value:.60} in YAML: write that, or put text in quotes"
            )
    if kind == "map":
        _check_keys(where, node)


def _check_keys(where: str, node: Any) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        is_text = key.tag in (f"{YAML_TAG}str", f"{YAML_TAG}merge")
        shown = key.value if isinstance(key.value, str) else "of this line"
        check(
            is_text and isinstance(key.value, str),
            f"{where}: line {line}: the key {shown:.60} is not text: write a flag's name, such as num_layers",
        )
        check(
            key.value not in lines,
            f"{where}: {key.value:.60} stands on the lines {lines.get(key.value)} and {line}: leave one out",
        )
        lines[key.value] = line
