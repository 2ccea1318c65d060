"""A placement as files that launchers read.

`hosts` is the order of physical host names by logical host: its first host gets the lowest ranks.

    hostfile   host:slots, MPICH's mpiexec -f
    openmpi    host slots=N, Open MPI's --hostfile and the MPI Operator's
    rankfile   rank N=host slot=S, Open MPI's --map-by rankfile:file=
    slurm      a host for each task: SLURM_HOSTFILE with srun --distribution=arbitrary
    perm       JSON: the rank that a process of the launcher's order takes on
    k8s        a ConfigMap with the openmpi hostfile and the perm
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.errors import UsageError

#: Of the perm file.
FORMAT = "commkit-placement"
VERSION = 1


@dataclass(frozen=True)
class Permutation:
    """rank[r] is the rank that the launcher's rank r takes on; whole hosts move.

    hosts  names in the launcher's order, for a check by whoever applies it
    """

    rank: tuple[int, ...]
    hosts: tuple[str, ...]
    ranks_per_host: int

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal iff all ranks would move alike."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def _json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "ranks_per_host": self.ranks_per_host,
                "hosts": self.hosts,
                "rank": self.rank,
            },
            separators=(",", ":"),
        )

    def text(self) -> str:
        body = json.loads(self._json())
        return json.dumps({**body, "digest": self.digest}) + "\n"


def permutation(host_of: Sequence[int], given: Sequence[str], ranks_per_host: int) -> Permutation:
    """host_of[logical host] is the index into `given`, the launcher's order of hosts."""
    rank = [0] * (len(host_of) * ranks_per_host)
    for logical, physical in enumerate(host_of):
        for local in range(ranks_per_host):
            rank[physical * ranks_per_host + local] = logical * ranks_per_host + local
    return Permutation(tuple(rank), tuple(given), ranks_per_host)


def is_permutation(text: str) -> bool:
    """Whether `text` is meant to be one, be it damaged: what else there is are fabrics."""
    return re.search(rf'"format"\s*:\s*"{FORMAT}"', text) is not None


def read_permutation(text: str, source: str = "placement") -> Permutation:
    """The opposite of `Permutation.text`; UsageError naming `source` and what is wrong in it."""

    def wrong(what: str) -> UsageError:
        return UsageError(f"{source}: {what}; write it with commkit place --emit perm")

    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise wrong(f'expected a JSON object with "format": "{FORMAT}"')
    if body.get("version") != VERSION:
        raise wrong(f"version {body.get('version')!r}: expected {VERSION}")
    rank, hosts, each = body.get("rank"), body.get("hosts"), body.get("ranks_per_host")
    if not isinstance(each, int) or isinstance(each, bool) or each < 1:
        raise wrong(f"ranks_per_host {each!r}: expected a number from 1 on")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise wrong("hosts: expected a list of names")
    if len(set(hosts)) != len(hosts):
        raise wrong(f"hosts: {next(h for h in hosts if hosts.count(h) > 1)!r} occurs twice")
    if not isinstance(rank, list) or not all(type(r) is int for r in rank):
        raise wrong("rank: expected a list of ranks")
    if len(rank) != len(hosts) * each or sorted(rank) != list(range(len(rank))):
        raise wrong(
            f"rank: expected each of 0 to {len(hosts) * each - 1} once, {each} for each of "
            f"{len(hosts)} hosts"
        )
    for first in range(0, len(rank), each):
        block = rank[first : first + each]
        if block[0] % each or block != list(range(block[0], block[0] + each)):
            raise wrong(
                f"the ranks {block[:9]} of host {hosts[first // each]!r} are not those of one "
                "host in order: whole hosts are permuted, local ranks stay"
            )
    made = Permutation(tuple(rank), tuple(hosts), each)
    if body.get("digest") not in (None, made.digest):
        raise wrong("the digest does not fit the contents")
    return made


# --- Files -----------------------------------------------------------------------------------

#: Of host names in these files: no blank, no quote, nothing that a format gives a meaning.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _checked(hosts: Sequence[str], ranks_per_host: int) -> Sequence[str]:
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"host name {host!r}: expected letters, digits, '.', '-', '_' only, as launchers' "
                "files have them"
            )
    if ranks_per_host < 1:
        raise UsageError(f"{ranks_per_host} ranks a host: expected 1 or more")
    return hosts


def hostfile(hosts: Sequence[str], ranks_per_host: int) -> str:
    """For MPICH, which fills hosts in this order."""
    return "".join(f"{host}:{ranks_per_host}\n" for host in _checked(hosts, ranks_per_host))


def openmpi_hostfile(hosts: Sequence[str], ranks_per_host: int) -> str:
    return "".join(f"{host} slots={ranks_per_host}\n" for host in _checked(hosts, ranks_per_host))


def rankfile(hosts: Sequence[str], ranks_per_host: int) -> str:
    """For Open MPI: each rank's host, bound to the slot of its local rank."""
    return "".join(
        f"rank {h * ranks_per_host + local}={host} slot={local}\n"
        for h, host in enumerate(_checked(hosts, ranks_per_host))
        for local in range(ranks_per_host)
    )


def slurm_hostfile(hosts: Sequence[str], ranks_per_host: int) -> str:
    """For SLURM_HOSTFILE: a line for each task in rank order.

    srun --distribution=arbitrary --ntasks=... places task i on line i's host.
    """
    return "".join(f"{host}\n" * ranks_per_host for host in _checked(hosts, ranks_per_host))


def kubernetes(hosts: Sequence[str], perm: Permutation, name: str) -> str:
    """A ConfigMap (JSON, which kubectl takes as YAML) with keys `hostfile` and `placement.json`."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,251}[a-z0-9])?", name):
        raise UsageError(f"ConfigMap name {name!r}: expected lower-case letters, digits and '-'")
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {
            "hostfile": openmpi_hostfile(hosts, perm.ranks_per_host),
            "placement.json": perm.text(),
        },
    }
    return json.dumps(body, indent=2) + "\n"


#: What `emit` knows.
FORMATS = ("hostfile", "openmpi", "rankfile", "slurm", "perm", "k8s")


def emit(
    form: str,
    host_of: Sequence[int],
    given: Sequence[str],
    ranks_per_host: int,
    *,
    name: str = "commkit-placement",
) -> str:
    """The placement in one of FORMATS; UsageError for another, or a name it cannot hold."""
    hosts = [given[physical] for physical in host_of]
    if form == "hostfile":
        return hostfile(hosts, ranks_per_host)
    if form == "openmpi":
        return openmpi_hostfile(hosts, ranks_per_host)
    if form == "rankfile":
        return rankfile(hosts, ranks_per_host)
    if form == "slurm":
        return slurm_hostfile(hosts, ranks_per_host)
    perm = permutation(host_of, given, ranks_per_host)
    if form == "perm":
        return perm.text()
    if form == "k8s":
        return kubernetes(hosts, perm, name)
    raise UsageError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
