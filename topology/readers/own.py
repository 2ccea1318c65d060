"""commkit's own description of a fabric: TOML for people, the same as JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from commkit.errors import TopologyError
from commkit.topology.fabric import Fabric
from commkit.topology.plain import from_plain, to_plain
from commkit.topology.readers.document import parse_json
from commkit.topology.readers.source import Source, load

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_toml(source: Source) -> Fabric:
    """Raises TopologyError with line and column; UsageError where Python < 3.11 has no tomli."""
    toml: Any = load("tomllib" if sys.version_info >= (3, 11) else "tomli", "tomli")
    text = source.text.removeprefix("\ufeff")
    if not text.strip():
        raise source.nothing("the file is empty")
    try:
        plain = toml.loads(text)
    except toml.TOMLDecodeError as error:
        match = _POSITION.search(str(error))
        what = _POSITION.sub("", str(error))
        if match and match[1]:
            raise source.error_at(int(match[1]), int(match[2]), f"not TOML: {what}") from None
        raise source.error(len(source.text), f"not TOML: {what}") from None
    except RecursionError:
        raise source.error(0, "not a topology: nested too deeply") from None

    def fail(path: tuple[str | int, ...], message: str) -> TopologyError:
        return source.error(_toml_offset(text, path), message)

    return from_plain(plain, fail)


def read_json(source: Source) -> Fabric:
    document = parse_json(source)

    def fail(path: tuple[str | int, ...], message: str) -> TopologyError:
        return document.error((0, *path), message)

    return from_plain(document.data[0] if document.data else None, fail)


def write_json(fabric: Fabric) -> str:
    return json.dumps(to_plain(fabric), ensure_ascii=False, indent=1) + "\n"


def write_toml(fabric: Fabric) -> str:
    plain = to_plain(fabric)
    tables = ("switches", "links", "hosts")
    out = [f"{key} = {_value(value)}" for key, value in plain.items() if key not in tables]
    for table in tables:
        for entry in plain[table]:
            out += ["", f"[[{table}]]"]
            out += [f"{key} = {_value(value, wide=True)}" for key, value in entry.items()]
    return "\n".join(out) + "\n"


def _value(value: Any, wide: bool = False) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's; DEL is the one character that only TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        if wide and len(value) > 1 and isinstance(value[0], (dict, list)):
            return "[\n" + "".join(f"  {_value(item)},\n" for item in value) + "]"
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)


def _toml_offset(text: str, path: tuple[str | int, ...]) -> int:
    """About where a value is: its table's header, then the line of its key."""
    at, end = 0, len(text)
    if len(path) >= 2 and isinstance(path[1], int):
        headers = [m.start() for m in re.finditer(rf"(?m)^[ \t]*\[\[[ \t]*{path[0]}", text)]
        if path[1] < len(headers):
            at = headers[path[1]]
            following = re.compile(r"(?m)^[ \t]*\[\[").search(text, text.find("\n", at) + 1 or end)
            end = following.start() if following else end
    keys = [step for step in path if isinstance(step, str)][len(path) >= 2 :]
    for key in keys:
        match = re.compile(rf"(?m)(?:^|[{{,])[ \t]*({re.escape(key)})[ \t]*=").search(text, at, end)
        if match is None:
            break
        at = match.start(1)
    return at
