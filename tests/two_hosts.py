"""Two hosts made as network namespaces that a veth pair joins, with one disk between them (Linux, root).

in: a folder where their commands run  ->  out: two Hosts
Invariant: nothing of them is left, whatever a test came to. Each has a name that means 127.0.1.1 to itself, as Debian's installer leaves
it: what listens there, the other can't reach.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import ROOT, Command

ENTER = ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", "ip", "netns", "exec"]
PREFIX, FILES = "shardline", Path("/etc/netns")  # `ip netns exec` lays a folder of these over /etc
NAMES, ADDRESSES = ("one", "two"), ("10.77.0.1", "10.77.0.2")


class NoHosts(Exception):
    """One line that says why none can be made here."""


def ip(*words):
    """The ip command; its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True, timeout=60).stdout


def remove(namespace: str) -> None:
    """End all processes of a host, and the host."""
    files = FILES / namespace
    shutil.rmtree(files, ignore_errors=True)
    if FILES.is_dir() and not any(FILES.iterdir()):
        FILES.rmdir()
    if namespace in namespaces():
        kill_all(namespace)
        ip("netns", "del", namespace)


def remove_stale() -> None:
    """Remove the hosts of tests that were killed before they could do it."""
    for namespace in namespaces():
        prefix, _, rest = namespace.partition("-")
        owner = rest.partition("-")[0]
        if prefix == PREFIX and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove(namespace)


def namespaces() -> list[str]:
    return [row.split()[0] for row in ip("netns", "list").splitlines()]


def kill_all(namespace: str) -> None:
    """SIGKILL to every process at once. Its kernel lives, so the other host is told that connections are closed."""
    while pids := ip("netns", "pids", namespace).split():
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


class Host:
    """One of the two machines."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address, self.folder = NAMES[number], ADDRESSES[number], folder
        self.namespace = f"{PREFIX}-{os.getpid()}-{self.name}"

    def set_up(self) -> None:
        ip("netns", "add", self.namespace)
        files = FILES / self.namespace
        files.mkdir(parents=True)
        others = [f"{address} {name}.lan {name if name != self.name else ''}" for name, address in zip(NAMES, ADDRESSES, strict=True)]
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others, ""]))
        (files / "nsswitch.conf").write_text("hosts: files\n")  # no name server can be reached from here

    def connect(self) -> None:
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", device, "up")

    def start(self, words, program=(ROOT / "run.py",), env=None) -> Command:
        """A command on this machine."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, sys.executable]
        return Command(self.folder, words, program=[*ENTER, self.namespace, *inside, *program], env=env)

    def die(self) -> None:
        """End all that runs on this machine."""
        kill_all(self.namespace)


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other, and nobody else. Raises NoHosts."""
    if not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        raise NoHosts("two machines need the commands ip (Debian's iproute2), unshare and hostname")
    if os.geteuid():
        raise NoHosts("two machines need root, to make network namespaces")
    pair = [Host(number, folder) for number in range(2)]
    try:
        try:
            remove_stale()
            for host in pair:
                host.set_up()
            ip("link", "add", "eth0", "netns", pair[0].namespace, "type", "veth", "peer", "name", "eth0", "netns", pair[1].namespace)
            for host in pair:
                host.connect()
        except (subprocess.CalledProcessError, OSError) as error:
            raise NoHosts(f"network namespaces can't be made here: {getattr(error, 'stderr', None) or error}") from None
        yield pair
    finally:
        for host in pair:
            remove(host.namespace)
