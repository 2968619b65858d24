"""What the commands of scripts/ that look into shards share: how they name shards, and how they end.

in: the work of a command  ->  out: its exit status
Invariant: a user's mistake is one line on stderr and 2; Ctrl-C is 130; a reader of the output that has seen enough is no mistake. An error
in the code stays a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

FORMS = "{000..099}, {a,b}, globs, folders, .txt lists, a::b"


def add_patterns(parser: argparse.ArgumentParser, nargs: str = "+", urls: bool = False) -> None:
    """The argument PATTERN. urls: remote shards are taken, too."""
    parser.add_argument("patterns", nargs=nargs, metavar="PATTERN", help=f"shards: {FORMS}{', URLs' if urls else ''} (quote them)")


def end(name: str, work: Callable[[], int | None]) -> int:
    """Do the work of the command `name`; the exit status, which is 0 where the work returns None."""
    try:
        return work() or 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 141
    except ValueError as error:  # ShardError too
        text = str(error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    print(f"{name}: error: {' '.join(text.split())}", file=sys.stderr)
    return 2
