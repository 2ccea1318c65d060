"""Every error commkit raises on purpose.

CommkitError                       exit code
├── UsageError                     2    an argument is wrong
│   ├── LayoutError                2    ... a layout or a list of ranks; a ValueError, too
│   ├── LayoutTypeError            2    ... ranks that are no integers; a TypeError, too
│   └── TopologyError              2    a description of the fabric is wrong: file, line, column
├── NoTopology                     6    it is well-formed and says nothing about where hosts are
├── LaunchError                    3    the environment does not describe a world
├── JoinError                      3    the world did not form, and who is to blame
│   └── JoinTimeout                124  ... because the deadline passed
├── RankDied                       1    a rank or a host was lost after the world had formed
├── DigestMismatch                 1    ranks disagree about what they are going to create
├── OverlayTimeout                 124  an operation of the agent tree outlived its deadline
├── OverlayError                   3    the host's agent is gone, or speaks another version
└── WrongData                      4    a collective delivered wrong values

A message names the variable, argument, rank, host or peer concerned, says what was expected
and what to do.  `commkit` prints it as one line; COMMKIT_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_THRESHOLD = 1
EXIT_USAGE = 2
EXIT_LAUNCH = 3
EXIT_WRONG_DATA = 4
EXIT_REGRESSION = 5
EXIT_NO_TOPOLOGY = 6
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130


class CommkitError(RuntimeError):
    """Base of all errors raised by commkit; a RuntimeError, as torch's DistError is."""

    exit_code = EXIT_THRESHOLD


class UsageError(CommkitError):
    exit_code = EXIT_USAGE


class LayoutError(UsageError, ValueError):
    """Also a ValueError, which is what torch raises for ranks outside the world or given twice."""


class LayoutTypeError(UsageError, TypeError):
    """Also a TypeError: ranks given as strings, floats or truth values."""


class TopologyError(UsageError):
    pass


class NoTopology(CommkitError):
    exit_code = EXIT_NO_TOPOLOGY


class LaunchError(CommkitError):
    exit_code = EXIT_LAUNCH


class JoinError(CommkitError):
    exit_code = EXIT_LAUNCH


class JoinTimeout(JoinError, TimeoutError):
    exit_code = EXIT_TIMEOUT


class RankDied(CommkitError):
    exit_code = EXIT_THRESHOLD


class DigestMismatch(CommkitError):
    exit_code = EXIT_THRESHOLD


class OverlayTimeout(CommkitError, TimeoutError):
    exit_code = EXIT_TIMEOUT


class OverlayError(CommkitError):
    exit_code = EXIT_LAUNCH


class WrongData(CommkitError):
    exit_code = EXIT_WRONG_DATA
