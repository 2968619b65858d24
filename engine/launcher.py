"""How a run ends: the launcher watches its ranks, tells the first failure once, and leaves no process behind.

in: the processes that mp.spawn started  ->  out: the exit code of the whole run
Invariant: a run ends when one of its ranks can't go on, when its launcher is gone, or when it is told to; then no process of it is left.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from data import LoaderError, ShardError

FAILED, STOPPED, INTERRUPTED = 1, 143, 130  # exit codes; 143: SIGTERM came, and what could be saved is saved
BY_TERM = frozenset({-signal.SIGTERM, -signal.SIGKILL})  # how a rank ends that had no time to save
SCRATCH, LOCK = "shardline-run-", "lock"
SAME = 1.0  # seconds: a job's manager may signal the launcher and then its whole process group
GRACE = 0.5  # seconds; what the first rank to fail said is on the disk before its peers can notice, so little is needed
NOT_THE_CODE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EEXIST})


class Stopped(Exception):
    """One line that says what ended a rank: the data or the machine is at fault, and a traceback would tell nothing more."""


def plain_reason(error: BaseException) -> str | None:
    """The line to tell in place of a traceback, where what went wrong is no fault of the code; else None."""
    text = str(error).strip()
    if text.startswith("Caught "):  # torch's wrapping of what a loader worker raised: its traceback, then "Type: message"
        text = text.splitlines()[-1].partition(": ")[2]
    if isinstance(error, (Stopped, ShardError, LoaderError)):
        return text
    if isinstance(error, OSError) and error.errno in NOT_THE_CODE:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, RuntimeError) and text.startswith("DataLoader worker (pid"):
        return f"{text.rstrip('. ')}: it may have run out of memory (see dmesg); fewer --workers need less"
    if isinstance(error, RuntimeError) and "/gloo/transport/" in text.partition("]")[0]:  # "[.../gloo/transport/tcp/pair.cc:561] what"
        what = text.partition("] ")[2].partition(". ")[0]
        return f"the connection to another rank is lost ({what}): it has ended, or its machine has; see what it said"
    return None


class StopRequest:
    """Remembers a SIGTERM until the ranks have agreed on a step to stop at; `at_once`: there is nothing to save, so it ends the process.

    Leaves Ctrl-C to the launcher, and ends the process if that one is gone. launcher: its pid; None if another program is it.
    """

    def __init__(self, launcher: int | None, at_once: bool = False) -> None:
        self.requested = False
        self._launcher, self._at_once = launcher, at_once
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if launcher is not None:
            signal.signal(signal.SIGINT, self._on_sigint)
            self._on_sigint()  # it may have gone while this process was importing

    def _on_sigterm(self, *_: object) -> None:
        self.requested = True
        if self._at_once:
            leave(STOPPED)

    def _on_sigint(self, *_: object) -> None:
        # torch has the kernel send SIGINT to a rank whose launcher is gone: no one is left who would end it
        if os.getppid() != self._launcher:
            leave(INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End this process and its loader workers at once: taking torch down, as the interpreter's own end does, costs seconds."""
    kill_tree(os.getpid(), itself=False)
    os._exit(code)


def end_workers() -> None:
    """End this process's loader workers: they ignore SIGTERM, and at its exit multiprocessing would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
    for worker in multiprocessing.active_children():
        worker.kill()


@contextmanager
def scratch_folder() -> Iterator[None]:
    """A folder for the temporary files of this process and all that it starts, which nobody else could remove after a SIGKILL.

    Removed at the end, with those of runs that were killed themselves: theirs are locked no more.
    """
    base, before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    # loader workers make sockets there, 60 characters further down, and a socket's path has 107 at most
    place = base if len(os.fsencode(base)) <= 47 or not os.access("/tmp", os.W_OK) else "/tmp"
    for stale in Path(place).glob(f"{SCRATCH}*/{LOCK}"):
        try:
            with open(stale, "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or gone meanwhile
            continue
    sweep_shared_memory()
    folder = tempfile.mkdtemp(prefix=SCRATCH, dir=place)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        with open(Path(folder, LOCK), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    finally:
        tempfile.tempdir = base
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def sweep_shared_memory() -> None:
    """Remove from /dev/shm what a killed loader worker left there in the moment between making a batch's memory and taking its name away:
    torch's names (torch_<pid>_...) of a process that is gone, of this user, that nobody has mapped."""
    for path in Path("/dev/shm").glob("torch_*_*"):
        maker = path.name.split("_")[1]
        try:
            if maker.isdecimal() and path.stat().st_uid == os.getuid() and not Path("/proc", maker).exists() and not _is_mapped(path):
                path.unlink()
        except OSError:  # gone meanwhile
            continue


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text(errors="replace"):
                return True
        except OSError:  # another user's, or gone
            continue
    return False


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C until they say otherwise: in the middle of their imports each would print a traceback."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def supervise(context: Any, first_rank: int = 0) -> int:
    """Wait for the ranks that mp.spawn(join=False) started, and return the exit code of the run.

    0: all done. 143: SIGTERM came and was forwarded to the ranks; a second one ends them at once. 130: Ctrl-C.
    1: a rank failed; what it said is printed once. No rank and no loader worker outlives the call.
    """
    processes, files = context.processes, context.error_files
    terminated = 0.0  # when the first SIGTERM came

    def forward(*_: object) -> None:
        nonlocal terminated
        again = terminated and time.monotonic() - terminated > SAME  # no time to save
        for process in processes:
            if process.is_alive():
                kill_tree(process.pid) if again else os.kill(process.pid, signal.SIGTERM)
        terminated = terminated or time.monotonic()

    previous = signal.signal(signal.SIGTERM, forward)
    not_ours = children(os.getpid())  # the ranks, and what was there before them
    _adopt_orphans(True)
    try:
        while any(process.exitcode is None for process in processes):
            connection.wait([p.sentinel for p in processes if p.exitcode is None], timeout=0.5)
            broken = {process.exitcode for process in processes} - {None, 0, STOPPED}
            failed = bool(_read_errors(files))  # said, but still there: taking torch down costs seconds
            if broken or failed:
                if failed or not terminated or broken - BY_TERM:  # else a rank that was still importing, with nothing to tell
                    _wait(processes, GRACE)
                break
        codes = [process.exitcode for process in processes]  # before those that are left are killed
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    finally:
        for process in processes:
            if process.is_alive():
                kill_tree(process.pid)
            process.join()
        for orphan in set(children(os.getpid())) - set(not_ours):
            kill_tree(orphan)
        _adopt_orphans(False)
        signal.signal(signal.SIGTERM, previous)
    errors = _read_errors(files)
    if not errors and set(codes) == {0}:
        return 0
    if not errors and (set(codes) <= {0, STOPPED} or (terminated and set(codes) <= {None, 0, STOPPED, *BY_TERM})):
        return STOPPED
    print(first_failure(codes, errors, first_rank), file=sys.stderr)
    return FAILED


def _wait(processes: list[Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.exitcode is None for process in processes):
        time.sleep(0.05)


def _read_errors(error_files: list[str]) -> dict[int, tuple[int, str]]:
    """local rank -> (when, the traceback that mp.spawn left in its file)."""
    errors = {}
    for number, path in enumerate(map(Path, error_files)):
        try:
            errors[number] = path.stat().st_mtime_ns, pickle.loads(path.read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):  # none, or not yet whole
            continue
    return errors


def first_failure(codes: list[int | None], errors: dict[int, tuple[int, str]], first_rank: int = 0) -> str:
    """What to print: a rank that a signal killed, else the earliest exception; the others' follow from it.

    codes: the exit code of each rank, None for one that hung; errors: what `_read_errors` gives.
    """
    killed = [(code == -signal.SIGABRT, i, -code) for i, code in enumerate(codes) if code is not None and code < 0]
    if killed and not (errors and min(killed)[0]):  # an abort follows from another's exception
        _, number, signal_number = min(killed)
        name = signal.Signals(signal_number).name
        reason = "it may have run out of memory, see dmesg" if name == "SIGKILL" else "see the lines above"
        return f"process {first_rank + number} was killed by {name} ({reason})"
    if not errors:
        return f"a process ended without a word; the exit codes are {codes}"
    number, (_, text) = min(errors.items(), key=lambda item: item[1])
    last = text.rstrip().rpartition("\n")[2]
    plain = f"{Stopped.__module__}.{Stopped.__qualname__}: "
    if last.startswith(plain):
        return f"run.py: error: {last.removeprefix(plain)}"
    return f"process {first_rank + number} failed:\n{text.rstrip()}"


def _adopt_orphans(adopt: bool) -> None:
    """Whether the loader workers of a rank that was killed become children of this process (Linux), which can then end them."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def kill_tree(pid: int, itself: bool = True) -> None:
    """SIGKILL a process and all that it started (loader workers); where there is no /proc, those end by their own watch."""
    for child in children(pid):
        kill_tree(child)
    if itself:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
