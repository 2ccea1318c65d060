"""JSON and YAML with positions: plain data whose errors say line and column.

Values are read once by the fast parsers; a position is looked up only when there is something to
complain about.  YAML scalars stay text: a host may be called 0123, no or 1e3.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from commkit.errors import NoTopology, TopologyError
from commkit.topology.readers.source import Source, load

#: A place in the data: keys and indices; the first one is the number of the document.
Path = tuple[str | int, ...]

#: Half of a pair that only together is a character; it cannot be written or printed.
_LONE = re.compile(
    r"(?i)(?<!\\)(?:\\\\)*(?:\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])"
    r"|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2})"
)
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Document:
    source: Source
    #: The documents of the file: several where YAML or concatenated JSON has several.
    data: list[Any]
    is_yaml: bool

    def error(self, path: Path, message: str) -> TopologyError:
        return self.source.error(self._offset(path), message)

    def position(self, path: Path) -> tuple[int, int]:
        return self.source.position(self._offset(path))

    def nothing(self, message: str) -> NoTopology:
        return self.source.nothing(message)

    # Each of these returns `value` as what it was expected to be, or raises.

    def mapping(self, value: Any, path: Path, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(value, path, f"{what} to be a mapping")
        return value

    def sequence(self, value: Any, path: Path, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(value, path, f"{what} to be a list")
        return value

    def name(self, value: Any, path: Path, what: str) -> str:
        """Text that is not empty; a JSON number counts as its digits."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(value, path, f"{what} to be a name")
        return value.strip()

    def optional_name(self, holder: dict[str, Any], key: str, path: Path) -> str | None:
        value = holder.get(key)
        if value is None or value == "":
            return None
        return self.name(value, (*path, key), key)

    def number(self, value: Any, path: Path, what: str) -> int:
        if isinstance(value, str) and self.is_yaml and re.fullmatch(r"[+-]?\d+", value):
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(value, path, f"{what} to be a whole number")
        return value

    def _wrong(self, value: Any, path: Path, expected: str) -> TopologyError:
        if isinstance(value, dict | list):
            # A few lines of YAML can stand for gigabytes.
            shown = "a mapping" if isinstance(value, dict) else "a list"
        else:
            shown = json.dumps(value, ensure_ascii=False, default=str)
            if len(shown) > 40:
                shown = shown[:37] + "..."
        return self.error(path, f"{shown}: expected {expected}")

    def _offset(self, path: Path) -> int:
        if self.is_yaml:
            return _yaml_offset(self.source.text, path)
        return _json_offset(self.source.text, path)


def parse_json(source: Source) -> Document:
    """One or more JSON values, one after the other (pages of an API, say)."""
    decoder = json.JSONDecoder()
    text = source.text.removeprefix("\ufeff")
    source = Source(source.name, text)
    found: list[Any] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            message = f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
            raise source.error(error.pos, message) from None
        except RecursionError:
            raise source.error(at, "not a topology: nested too deeply") from None
        found.append(value)
        at = _skip(text, at)
    if lone := _LONE.search(text):
        raise source.error(lone.start(), f"{lone[0]}: half a character: expected both halves")
    return Document(source, found, is_yaml=False)


def parse_yaml(source: Source) -> Document:
    yaml = load("yaml", "PyYAML")
    try:
        found = yaml.load_all(source.text, _yaml_loader(yaml))
        data = [value for value in found if value not in ("", None)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise source.error_at(line, column, f"not YAML: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise source.error_at(1, 1, f"not YAML: {' '.join(str(error).split())}") from None
    return Document(source, data, is_yaml=True)


def _yaml_loader(yaml: Any) -> Any:
    """libyaml where it is there, ten times as fast; scalars stay text in both."""
    return getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def parse(source: Source) -> Document:
    """By the first character: JSON starts with a bracket, and its errors are the better ones."""
    return (
        parse_json(source)
        if source.text.lstrip("\ufeff \t\r\n")[:1] in "{["
        else parse_yaml(source)
    )


def _skip(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def _yaml_offset(text: str, path: Path) -> int:
    yaml = load("yaml", "PyYAML")
    # Both loaders refuse texts that the other one takes: the one that has read this one.
    found = yaml.compose_all(text, _yaml_loader(yaml))
    nodes = [n for n in found if n is not None and n.value != ""]
    node = nodes[path[0]] if path and isinstance(path[0], int) and path[0] < len(nodes) else None
    if node is None:
        return 0
    for step in path[1:]:
        children = node.value if isinstance(node.value, list) else []
        if isinstance(node, yaml.MappingNode):
            below = next((v for k, v in children if k.value == step), None)
        else:
            below = children[step] if isinstance(step, int) and step < len(children) else None
        if below is None:
            break
        node = below
    return int(node.start_mark.index)


def _json_offset(text: str, path: Path) -> int:
    """Where a value starts; the nearest holder's start if it is not there."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    if path:
        for _ in range(int(path[0])):
            _, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
    for step in path[1:]:
        below = _child(decoder, text, at, step)
        if below < 0:
            break
        at = below
    return min(at, max(len(text) - 1, 0))


def _child(decoder: json.JSONDecoder, text: str, at: int, step: str | int) -> int:
    opening = text[at]
    if opening not in "{[":
        return -1
    at = _skip(text, at + 1)
    number = 0
    found = -1
    while text[at] not in "}]":
        name: Any = number
        if opening == "{":
            name, at = decoder.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        if name == step:
            found = at  # of a key that is there twice, the last one counts
            if opening == "[":
                return found
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        number += 1
    return found
