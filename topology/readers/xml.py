"""A small tree of XML elements with their lines, read by expat.

Declarations of types and entities are refused: no topology needs them, and they are how XML bites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from commkit.errors import TopologyError
from commkit.topology.readers.source import Source

MAX_DEPTH = 200


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list[Element] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """An attribute; an empty one counts as absent."""
        return self.attributes.get(name) or None

    def all(self, *tags: str) -> Iterator[Element]:
        return (child for child in self.children if child.tag in tags)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            yield from child.walk()


def parse(source: Source) -> Element:
    """The root element.  Raises TopologyError with line and column."""
    parser = expat.ParserCreate()
    root: list[Element] = []
    stack: list[Element] = []

    def fail(message: str) -> TopologyError:
        line, column = parser.CurrentLineNumber, parser.CurrentColumnNumber + 1
        return source.error_at(line, column, message)

    def start(tag: str, attributes: dict[str, str]) -> None:
        line, column = parser.CurrentLineNumber, parser.CurrentColumnNumber + 1
        element = Element(tag, attributes, line, column)
        if len(stack) >= MAX_DEPTH:
            raise fail(f"<{tag}>: nested more than {MAX_DEPTH} deep")
        (stack[-1].children if stack else root).append(element)
        stack.append(element)

    def end(tag: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise fail("a document type declaration: expected plain XML without one")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(source.text, True)
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        raise source.error_at(error.lineno, error.offset + 1, f"not XML: {reason}") from None
    return root[0]
