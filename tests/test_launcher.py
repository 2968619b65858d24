"""How a run ends: the first failure is told once, in a line where the code is not at fault; no process is left."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import ShardError, StaleIndexError
from engine import launcher
from engine.launcher import FAILED, INTERRUPTED, STOPPED, Stopped, first_failure, plain_reason
from engine.train import TooManyBadSamples

CAUGHT = "Caught StaleIndexError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StaleIndexError("000.tar: its index does not fit it"), "000.tar: its index does not fit it"),
        (StaleIndexError(f"{CAUGHT}data.errors.StaleIndexError: 000.tar: gone\n"), "000.tar: gone"),
        (ShardError("x.tar: can't be read any more: Stale file handle"), "x.tar: can't be read any more: Stale file handle"),
        (TooManyBadSamples("11 of 20 samples are bad"), "11 of 20 samples are bad"),
        (OSError(errno.ENOSPC, "No space left on device; mend that", "/runs/a"), "/runs/a: No space left on device; mend that"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
        (FileExistsError(errno.EEXIST, "it is there", "/runs/a"), "/runs/a: it is there"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "DataLoader worker (pid 7) is killed by signal: Killed: it may have run out of memory (see dmesg); fewer --workers need less",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), None),  # a mistake of the code, for all that is known
        (ValueError("x"), None),
        (
            RuntimeError("[/b/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.2]:4244. This is typically caused by"),
            "the connection to another rank is lost (Connection closed by peer [10.0.0.2]:4244): it has ended, or its machine has; "
            "see what it said",
        ),
        (RuntimeError("Connection closed by peer"), None),
        (KeyError("x"), None),
    ],
)
def test_what_is_no_fault_of_the_code_is_told_in_a_line(error, reason):
    assert plain_reason(error) == reason


TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: boom\n'
PLAIN = "Traceback (most recent call last):\n  File x\nengine.launcher.Stopped: 000.tar: its index does not fit it\n"
LOST = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"


@pytest.mark.parametrize(
    ("codes", "errors", "told"),
    [
        ([1, 1], {0: (20, LOST), 1: (10, TRACEBACK)}, f"process 5 failed:\n{TRACEBACK.rstrip()}"),
        ([1, 1], {0: (20, LOST), 1: (10, PLAIN)}, "run.py: error: 000.tar: its index does not fit it"),
        ([1, -9], {0: (10, LOST)}, "process 5 was killed by SIGKILL (it may have run out of memory, see dmesg)"),
        ([-11, 1], {1: (10, LOST)}, "process 4 was killed by SIGSEGV (see the lines above)"),
        ([1, -6], {0: (10, TRACEBACK)}, f"process 4 failed:\n{TRACEBACK.rstrip()}"),  # gloo aborts when a peer is lost
        ([0, -6], {}, "process 5 was killed by SIGABRT (see the lines above)"),
        ([None, 3], {}, "a process ended without a word; the exit codes are [None, 3]"),
    ],
)
def test_the_first_failure_is_told(codes, errors, told):
    assert first_failure(codes, errors, first_rank=4) == told


def rank_that(what, ready):
    """A process as supervise has them; it says `ready` when what it does has begun."""
    if what in ("save", "hang"):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED) if what == "save" else None)
    ready.release()
    if what == "fail":
        os._exit(1)
    if what != "end":
        time.sleep(60)


def context_of(tmp_path, *whats):
    """A started mp.spawn context with a rank for each of `whats`."""
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    processes = [context.Process(target=rank_that, args=(what, ready)) for what in whats]
    for process in processes:
        process.start()
    for _ in processes:
        assert ready.acquire(timeout=60)
    return SimpleNamespace(processes=processes, error_files=[str(tmp_path / f"{number}") for number in range(len(whats))])


def later(signal_number, times=1, seconds=0.5):
    """Sends this process a signal in so many seconds, from another."""
    send = f"import os, time; time.sleep({seconds}); [os.kill({os.getpid()}, {int(signal_number)}) for _ in range({times})]"
    return subprocess.Popen([sys.executable, "-S", "-c", send])


def alive(context):
    return [process.is_alive() for process in context.processes]


def test_all_done_is_0(tmp_path, capfd):
    context = context_of(tmp_path, "end", "end")
    assert launcher.supervise(context) == 0
    assert capfd.readouterr() == ("", "")


def test_a_failed_rank_ends_the_others(tmp_path, capfd):
    context = context_of(tmp_path, "fail", "hang")
    started = time.monotonic()
    assert launcher.supervise(context) == FAILED
    assert time.monotonic() - started < 15
    assert alive(context) == [False, False]
    assert capfd.readouterr().err == "a process ended without a word; the exit codes are [1, None]\n"


# "import": a rank that can't yet save anything, and dies of it
@pytest.mark.parametrize(
    ("whats", "times"), [(("save", "save"), 1), (("save", "save"), 5), (("save", "import"), 1), (("hang", "import"), 1)]
)
def test_sigterm_is_forwarded(tmp_path, capfd, whats, times):
    context = context_of(tmp_path, *whats)
    handler = signal.getsignal(signal.SIGTERM)
    sender = later(signal.SIGTERM, times)
    assert launcher.supervise(context) == STOPPED
    assert sender.wait() == 0
    assert signal.getsignal(signal.SIGTERM) == handler
    assert alive(context) == [False, False]
    assert capfd.readouterr() == ("", "")


def test_a_second_sigterm_ends_at_once(tmp_path, capfd, monkeypatch):
    context = context_of(tmp_path, "hang", "hang")
    monkeypatch.setattr(launcher, "SAME", 0.2)
    senders = [later(signal.SIGTERM, seconds=seconds) for seconds in (0.5, 1.5)]
    assert launcher.supervise(context) == STOPPED
    assert [sender.wait() for sender in senders] == [0, 0]
    assert alive(context) == [False, False]
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_after_sigterm_ends_at_once(tmp_path, capfd):
    context = context_of(tmp_path, "hang", "hang")  # ranks that are still about to save
    handler = signal.getsignal(signal.SIGINT)
    senders = [later(number, seconds=seconds) for number, seconds in ((signal.SIGTERM, 0.5), (signal.SIGINT, 1.0))]
    try:
        assert launcher.supervise(context) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [sender.wait() for sender in senders] == [0, 0]
    assert alive(context) == [False, False]
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_said_why_is_not_waited_for(tmp_path, capfd):
    context = context_of(tmp_path, "hang", "hang")
    (tmp_path / "1").write_bytes(pickle.dumps(TRACEBACK)[:-5])  # still being written
    write = f"import time; time.sleep(1); open({str(tmp_path / '1')!r}, 'wb').write({pickle.dumps(TRACEBACK)!r})"
    writer = subprocess.Popen([sys.executable, "-S", "-c", write])
    assert launcher.supervise(context, first_rank=2) == FAILED
    writer.wait()
    assert alive(context) == [False, False]
    assert capfd.readouterr().err == f"process 3 failed:\n{TRACEBACK}"


def test_a_rank_that_sigterm_reached_by_another_way_stops_the_run(tmp_path):
    context = context_of(tmp_path, "save", "save")
    for process in context.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert launcher.supervise(context) == STOPPED


def test_a_rank_that_fails_to_save_is_told(tmp_path, capfd):
    context = context_of(tmp_path, "save", "fail")
    (tmp_path / "1").write_bytes(b"")
    sender = later(signal.SIGTERM)
    assert launcher.supervise(context) == FAILED
    sender.wait()
    assert "without a word" in capfd.readouterr().err


def test_ctrl_c_is_130_and_leaves_nobody(tmp_path, capfd):
    context = context_of(tmp_path, "hang", "save")
    handler = signal.getsignal(signal.SIGINT)
    sender = later(signal.SIGINT)
    try:
        assert launcher.supervise(context) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, handler)
    sender.wait()
    assert alive(context) == [False, False]
    assert capfd.readouterr() == ("", "")


def test_processes_that_are_started_meanwhile_ignore_ctrl_c():
    handler = signal.getsignal(signal.SIGINT)
    script = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    with launcher.ctrl_c_ignored():
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert signal.getsignal(signal.SIGINT) == handler
    assert child.communicate()[0] == b"True\n"


def test_a_tree_is_killed_to_its_leaves():
    leaf = "import time; print(1, flush=True); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{leaf}']).wait()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert len(launcher.children(parent.pid)) == 1
    launcher.kill_tree(parent.pid)
    assert parent.wait() == -signal.SIGKILL
    assert parent.stdout.read() == b""  # closed: the child is gone too
    launcher.kill_tree(parent.pid)  # gone already


def stop_request(queue, launcher_pid, at_once):
    request = launcher.StopRequest(launcher_pid, at_once)
    queue.put(request.requested)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    queue.put(request.requested)


@pytest.mark.parametrize(
    ("gone", "at_once", "code", "said"),
    [(False, False, 0, [False, True]), (False, True, STOPPED, [False]), (True, False, INTERRUPTED, [])],
)
def test_a_rank_remembers_sigterm_and_ends_without_its_launcher(gone, at_once, code, said):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=stop_request, args=(queue, 1 if gone else os.getpid(), at_once))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert [queue.get() for _ in said] == said and queue.empty()


def test_stopped_is_what_a_rank_ends_with():
    assert issubclass(TooManyBadSamples, Stopped)


@pytest.fixture
def short_place(monkeypatch):
    """A temporary folder with a path as short as those of users."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as place:
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield place


def test_scratch_folders_are_removed_with_those_of_killed_runs(short_place):
    os.mkdir(f"{short_place}/shardline-0")  # the cache
    hold = "import os, sys, tempfile; sys.path.insert(0, '.'); from engine import launcher\nwith launcher.scratch_folder():\n"
    hold += "    print(os.environ['TMPDIR'], flush=True); input()"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    runs = [
        subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)
    ]  # fmt: skip
    folders = [run.stdout.readline().strip() for run in runs if run.stdout]
    assert all(os.path.isdir(folder) for folder in folders)
    runs[0].kill()
    runs[0].wait()
    with launcher.scratch_folder():
        mine = tempfile.gettempdir()
        assert os.environ["TMPDIR"] == mine and os.path.dirname(mine) == short_place
        assert sorted(os.listdir(short_place)) == sorted(["shardline-0", os.path.basename(folders[1]), os.path.basename(mine)])
    assert (os.environ["TMPDIR"], tempfile.gettempdir()) == (short_place, short_place)
    runs[1].communicate("\n")
    assert os.listdir(short_place) == ["shardline-0"]


def test_a_scratch_folder_has_room_for_the_path_of_a_socket(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with launcher.scratch_folder():
        assert os.path.dirname(tempfile.gettempdir()) == "/tmp"
    assert tempfile.gettempdir() == str(deep)


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not os.path.isdir("/proc/self"), reason="there is no /dev/shm or no /proc here")
def test_shared_memory_that_a_killed_process_left_is_swept():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, mapped, living = (Path("/dev/shm", f"torch_{pid}_{name}") for pid, name in ((gone.pid, "1"), (gone.pid, "2"), (os.getpid(), "3")))
    for path in (left, mapped, living):
        path.write_bytes(bytes(4096))
    try:
        with open(mapped, "r+b") as file, mmap.mmap(file.fileno(), 4096):
            launcher.sweep_shared_memory()
            assert [path.exists() for path in (left, mapped, living)] == [False, True, True]
    finally:
        for path in (mapped, living):
            path.unlink()
