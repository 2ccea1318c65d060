"""The imports of commkit follow the layer table in ARCHITECTURE.md, which is read from there.

A layer may import lower ones, never its own row or a higher one; torch only where the table says
so.  Imports inside functions, under TYPE_CHECKING and by importlib count as well.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROW = re.compile(r"^\|\s*(?P<units>`[^|]*?)\s*\|\s*(?P<torch>yes|no)\s*\|", re.MULTILINE)
PACKAGE = "__init__"


@dataclass(frozen=True)
class Unit:
    """A module, a subpackage, or several of them joined by + that may import one another."""

    names: str
    level: int
    torch: bool


def parse_table(text: str) -> dict[str, Unit]:
    """Name below commkit -> its unit, from the rows between the two `layers` comments."""
    begin, end = "<!-- layers: lowest first -->", "<!-- /layers -->"
    table = text[text.index(begin) : text.index(end)]
    units: dict[str, Unit] = {}
    for level, row in enumerate(ROW.finditer(table)):
        for unit in row["units"].split(","):
            for name in re.findall(r"`(\w+)`", unit):
                assert name not in units, f"{name} is twice in the layer table"
                units[name] = Unit(unit.strip(), level, row["torch"] == "yes")
    return units


def modules(package: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every source file of `package` with its dotted name below commkit; follows the link."""
    for directory, _, files in os.walk(package, followlinks=True):
        for file in sorted(files):
            path = Path(directory, file)
            if path.suffix in (".py", ".pyi"):
                yield path, list(path.relative_to(package).with_suffix("").parts)


def imported(tree: ast.AST, module: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported; `from a import b` is a.b."""
    here = ["commkit", *module][:-1]  # the package that relative names start from
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = here[: len(here) - node.level + 1] + base
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if isinstance(first, ast.JoinedStr) and first.values:
                first = first.values[0]
            text = first.value if isinstance(first, ast.Constant) else None
            if function in ("import_module", "__import__") and isinstance(text, str):
                yield node.lineno, text.rstrip(".")


def violations(package: Path, units: dict[str, Unit]) -> list[str]:
    found = []
    files = list(modules(package))
    # commkit/__init__.py is the unit __init__, commkit/bench/__init__.py belongs to bench.
    on_disk = {module[0] for _, module in files}
    for path, module in files:
        own = module[0]
        where = path.relative_to(package.parent)
        if own not in units:
            found.append(f"{where}: not in the layer table")
            continue
        unit = units[own]
        for line, name in imported(ast.parse(path.read_text(), str(path)), module):
            top, *rest = name.split(".")
            problem = ""
            if top == "torch" and not unit.torch:
                problem = "torch is not allowed here"
            elif top in ("topology", "tests", "benchmarks"):
                problem = f"{top} is not a package of its own"
            elif top == "commkit":
                target = rest[0] if rest and rest[0] in on_disk else PACKAGE
                if target not in units:
                    continue  # said once, at its own file
                other = units[target]
                if other != unit and other.level >= unit.level:
                    side = "sideways" if other.level == unit.level else "upward"
                    problem = f"{side}: {unit.names} may not import {target}"
            if problem:
                found.append(f"{where}:{line}: import of {name}: {problem}")
    found += [f"{name}: in the layer table, not on disk" for name in sorted(set(units) - on_disk)]
    return found


@pytest.fixture(scope="module")
def units(repository) -> dict[str, Unit]:
    return parse_table((repository / "ARCHITECTURE.md").read_text())


def test_imports_follow_the_layer_table(repository, units):
    assert not (found := violations(repository / "commkit", units)), "\n" + "\n".join(found)


def test_the_layer_table_is_read_whole(repository, units):
    """Guards against a table whose rows no longer look like rows."""
    levels = [units[name].level for name in ("errors", "settings", "launch", "api", "cli")]
    assert levels == sorted(set(levels))
    assert not units["launch"].torch
    assert units["api"].torch
    assert units[PACKAGE].level == max(unit.level for unit in units.values())


TABLE = """
<!-- layers: lowest first -->
| Layer | torch | Subject |
|---|---|---|
| `errors` | no | |
| `low`, `side` | no | |
| `mid` + `mid_parts` | yes | |
| `__init__` | no | |
<!-- /layers -->
"""

LEGAL = {
    "low.py": "import os\nfrom commkit import errors\nfrom commkit.errors import E\n",
    "mid.py": "import torch\nfrom commkit.mid_parts import x\nfrom .low import y\n",
    "mid_parts/__init__.py": "def f():\n    import commkit.mid\n",
    "mid_parts/deep.py": "from ..errors import E\nfrom . import other\n",
    "mid_parts/other.py": "",
    "errors.py": "",
    "side.py": "",
    "__init__.py": "from commkit.mid import z\n",
}


@pytest.fixture
def tree(tmp_path):
    """A package with the legal files, and some of them replaced or added."""

    def make(changes):
        for name, text in {**LEGAL, **changes}.items():
            path = tmp_path / "commkit" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return violations(tmp_path / "commkit", parse_table(TABLE))

    return make


def test_legal_imports_pass(tree):
    assert tree({}) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("low.py", "from commkit.mid import x", "low.py:1: .*upward: `low` may not import mid"),
        ("low.py", "from commkit import mid", "upward"),
        ("low.py", "import commkit.mid as m", "upward"),
        ("low.py", "from .mid import x", "upward"),
        ("low.py", "from . import mid", "upward"),
        ("low.py", "def f():\n    from commkit import mid", "low.py:2: .*upward"),
        ("low.py", "if TYPE_CHECKING:\n    from commkit.mid import T", "low.py:2: .*upward"),
        ("low.py", "importlib.import_module('commkit.mid')", "upward"),
        ("low.py", "import_module(f'commkit.mid.{x}')", "upward"),
        ("low.py", "__import__('commkit.mid')", "upward"),
        ("low.py", "from commkit import init_process_group", "may not import __init__"),
        ("low.py", "from commkit.side import x", "sideways: `low` may not import side"),
        ("mid_parts/deep.py", "from .. import init", "may not import __init__"),
        ("low.py", "import torch.distributed", "torch is not allowed"),
        ("low.py", "if TYPE_CHECKING:\n    from torch import Tensor", "torch is not allowed"),
        ("low.py", "def f():\n    importlib.import_module('torch')", "torch is not allowed"),
        ("low.py", "from topology.hostlist import expand", "topology is not a package of its own"),
        ("new.py", "", "new.py: not in the layer table"),
    ],
)
def test_a_wrong_import_is_found(tree, file, text, expected):
    found = tree({file: text})
    assert len(found) == 1
    assert re.search(expected, found[0])


def test_a_table_row_without_a_module_is_found(tree, tmp_path):
    tree({})
    (tmp_path / "commkit" / "side.py").unlink()
    assert violations(tmp_path / "commkit", parse_table(TABLE)) == [
        "side: in the layer table, not on disk"
    ]
