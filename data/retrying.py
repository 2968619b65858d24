"""Requests that fail are made again, or are explained.

in: a request to a store, the URL it is about  ->  out: its result, or a ShardError of one line without secrets
Invariant: what may pass is tried again, with longer and longer pauses: resets, time-outs, 408, 429, 5xx, short reads. An error of the code
is raised as it is.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from .errors import ShardError
from .urls import redact, scrub

ATTEMPTS = 9
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between attempts: doubled each time, and drawn between half and all of that
UNREACHABLE_ATTEMPTS = 4  # of a server that refuses connections or has no address
_LIBRARIES = frozenset({
    "aiohttp", "botocore", "aiobotocore", "gcsfs", "google", "azure", "requests", "urllib3", "httpx", "httpcore", "huggingface_hub",
})  # fmt: skip
_UNREACHABLE = frozenset({"ClientConnectorError", "ClientConnectorDNSError", "EndpointConnectionError", "ConnectionRefusedError"})
_FINAL = frozenset({errno.ENOSPC, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EDQUOT})

T = TypeVar("T")


class Passing(Exception):
    """A failure that may be gone at the next attempt."""

    def __init__(self, reason: str, unreachable: bool) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class ChangedError(ShardError):
    """The file is not the one that was there before."""


class NotThere(ShardError):
    """404, or a 403 where the store does not tell which."""


def retried(url: str, work: Callable[[], T]) -> T:
    """work(), again and again while what it meets may pass. Raises ShardError; `url` is named in it."""
    started = time.monotonic()
    draw = random.SystemRandom()  # forked workers share the state of others, and would come back all at once
    attempt = 0
    while True:
        try:
            return explained(url, work)
        except Passing as error:
            attempt += 1
            if attempt >= (UNREACHABLE_ATTEMPTS if error.unreachable else ATTEMPTS):
                tried = f"{attempt} tries in {time.monotonic() - started:.0f} s"
                raise ShardError(f"{redact(url)}: can't be read: {error} ({tried})") from None
            time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * draw.uniform(0.5, 1))


def explained(url: str, work: Callable[[], T]) -> T:
    """work(), its errors sorted: ShardError, Passing, or as they are where the code is at fault. None shows a secret."""
    try:
        return work()
    except (ShardError, Passing):
        raise
    except FileNotFoundError:
        raise NotThere(f"{redact(url)}: not there (404): check the name") from None
    except PermissionError:
        raise NotThere(
            f"{redact(url)}: access denied (403): check the name, and the credentials or the signature (a resumed run needs --data again: "
            "signatures are not saved)"
        ) from None
    except Exception as error:
        reason = scrub(str(error)) or type(error).__name__
        status = getattr(error, "status", None)
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, OSError) and error.errno in _FINAL:
            raise ShardError(f"{redact(url)}: {reason}") from None
        if "Credentials" in type(error).__name__ or (isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)):
            raise ShardError(f"{redact(url)}: can't be read: {reason}") from None
        if isinstance(error, (OSError, EOFError)) or library in _LIBRARIES:
            raise Passing(f"{type(error).__name__}: {reason}", type(error).__name__ in _UNREACHABLE) from None
        raise
