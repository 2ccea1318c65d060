"""What the documents quote is so: texts of errors, settings, links."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from commkit.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def between(document, mark):
    return document.partition(f"<!-- {mark} -->")[2].partition(f"<!-- /{mark} -->")[0]


@functools.cache
def literals():
    """Everything between quotes in the sources, pieces of one literal joined."""
    text = ""
    for path in [
        *ROOT.glob("commkit/**/*.py"),
        *ROOT.glob("csrc/**/*.cc"),
        *ROOT.glob("csrc/**/*.h"),
    ]:
        source = re.sub(r'"\s*\n?\s*f?"', "", path.read_text())
        text += source.replace('\\"', '"')
    return text


def quoted_errors():
    table = between((ROOT / "docs" / "start.md").read_text(), "errors")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [re.match(r"\| `([^`]*)` \|", row)[1] for row in rows]


def test_the_table_of_errors_is_found():
    assert len(quoted_errors()) > 20


@pytest.mark.parametrize("stem", quoted_errors())
def test_an_error_that_the_documents_quote_is_in_the_sources(stem):
    known = literals()
    for part in stem.split("…"):
        assert len(part.strip()) >= 5, "too short to tell anything"
        assert part in known, f"{part!r} is nowhere in commkit/ or csrc/"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_a_document_names_exist(document):
    known = {*VARIABLES, "COMMKIT_WERROR"}  # the build's own
    # COMMKIT_* stands for all of them.
    for name in re.findall(r"COMMKIT_[A-Z_]*[A-Z]", document.read_text()):
        assert name in known, f"{document.name}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_links_to_exist(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
