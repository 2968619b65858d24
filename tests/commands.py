"""run.py as a shell starts it: real processes, the signals they get, and who of them is left.

in: the words of a command  ->  out: its exit code, what it printed, the processes that it and its children started
Invariant: processes are found by a mark in their environment, so one that lost its parent is found too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "SHARDLINE_TEST_MARK"
PATIENCE = 240  # seconds: machines that run tests may be busy


class Command:
    """A started `python run.py`, in a session of its own, with `folder` as its working directory."""

    def __init__(
        self, folder: Path, argv: Sequence[Any], *, program: Sequence[Any] = (ROOT / "run.py",), env: dict[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.files = [folder / f"{self.mark}.{name}" for name in ("out", "err")]
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with open(self.files[0], "wb") as out, open(self.files[1], "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, program), *map(str, argv)], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True, env={**environ, **(env or {}), MARK: self.mark},
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        return self.files[1].read_text()

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE)

    def send(self, number: int, to_group: bool = False) -> None:
        """A signal to the launcher alone, or to all of its process group, as a terminal or SLURM does."""
        os.kill(-self.process.pid if to_group else self.process.pid, number)

    def alive(self) -> list[int]:
        """Every process of this command that is there, its own too."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:  # gone meanwhile, or another user's
                    pass
        return sorted(found)

    def ranks(self) -> list[int]:
        """The processes that the launcher spawned, in the order of ranks."""
        return [pid for pid in children(self.process.pid) if b"spawn_main" in cmdline(pid)]

    def wait_for(self, what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """The first true value of what()."""
        end = time.monotonic() + seconds
        while not (value := what()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"nothing came in {seconds} s:\n{self.out}\n{self.err}"
            time.sleep(0.05)
        return value

    def wait_until_gone(self, seconds: float) -> None:
        """Fails unless every process is gone within so many seconds."""
        end = time.monotonic() + seconds
        while left := self.alive():
            assert time.monotonic() < end, f"{[(pid, cmdline(pid)) for pid in left]} are left after {seconds} s"
            time.sleep(0.1)

    def kill(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def children(pid: int) -> list[int]:
    try:
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return []


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def last_step(folder: Path) -> int:
    """How far a run has told that it came; 0 before it has told anything."""
    try:
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return 0
    return max((json.loads(line).get("step", 0) for line in lines), default=0)
