"""Results of commkit and of other tools as records; nothing here needs torch.

module      subject
reading     what a file gave: records, and notes about what is missing
lines       output of several ranks, prefixed and mixed by their launcher
bandwidth   busbw over algbw, by collective
nccl_text   nccl-tests' table, of all ages; commkit prints the same
nccl_json   nccl-tests' -J, versions 1 to 3
osu         OSU micro-benchmarks: collectives, latency, bandwidth
imb         Intel MPI Benchmarks
table       records as nccl-tests' table, narrow and wide
csv         records as CSV
"""

from __future__ import annotations

import os

from commkit import records
from commkit.bench.formats import imb, nccl_json, nccl_text, osu
from commkit.bench.formats.reading import Given, Reading
from commkit.errors import UsageError

#: name -> (does the text look like it?, its reader)
_READERS = {
    "nccl-tests JSON": (nccl_json.looks_like, nccl_json.read),
    "nccl-tests": (nccl_text.looks_like, nccl_text.read),
    "OSU": (osu.looks_like, osu.read),
    "IMB": (imb.looks_like, imb.read),
}


def read(path: str | os.PathLike[str], *, collective: str = "", ranks: int = 0) -> Reading:
    """The records of a file of any known format, which is recognised by its content.

    `collective` and `ranks` say what the file does not: old versions of nccl-tests name no
    collective, OSU's benchmarks no number of ranks.  Raises UsageError naming file, line and
    what was expected.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read()
            changed = os.fstat(stream.fileno()).st_mtime
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; expected a file of results") from None
    if data.lstrip()[:1] == b"{" and not nccl_json.looks_like(data.decode("utf-8", "replace")):
        return Reading("commkit records", list(records.read(path)))
    text = data.decode("utf-8", "replace")
    for looks_like, reader in _READERS.values():
        if looks_like(text):
            return reader(text, Given(name, changed, collective, ranks))
    if not text.strip():
        raise UsageError(f"{name}: empty; expected results")
    raise UsageError(
        f"{name}: not recognised; expected records of commkit (JSON lines), or output of {known()}"
    )


def known() -> str:
    return ", ".join(_READERS)
