"""Servers on loopback for tests of remote shards: nginx for HTTP, a proxy in front of it that injects faults, moto's for S3, one for GCS.

in: a folder, or nothing  ->  out: the URL of a running server, which ends with the test
Invariant: every one listens on a free port of its own, and leaves no process behind.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CONFIG = """
daemon off; master_process off; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log {home}/access.log; client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi; types {{ text/html html; }} default_type application/octet-stream;
    sendfile on;
    server {{ listen 127.0.0.1:{port}; root {root}; location /forbidden/ {{ return 403; }} }}
}}
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < end, f"no server on port {port}"
            time.sleep(0.05)


@contextmanager
def running(argv: list[str], port: int, **environ: str) -> Iterator[None]:
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environ}
    )
    try:
        wait_for_port(port, process)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class Served:
    """A folder that nginx serves: `url`, and what was asked of it."""

    def __init__(self, url: str, root: Path, log: Path) -> None:
        self.url, self.root, self._log = url, root, log
        self._read = 0

    def requests(self) -> list[tuple[str, int, int]]:
        """(path, status, bytes sent) of each request since the last call."""
        lines = self._log.read_text().splitlines()
        found = []
        for line in lines[self._read :]:
            _, request, rest = line.split('"')[:3]
            status, sent = rest.split()
            found.append((request.split()[1].partition("?")[0], int(status), int(sent)))
        self._read = len(lines)
        return found


@contextmanager
def serve(root: Path, home: Path) -> Iterator[Served]:
    """nginx serving the folder `root`; its own files lie in `home`."""
    if NGINX is None:
        pytest.fail("nginx is missing: apt-get install nginx-light (scripts/ci_packages.txt)")
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (home / "nginx.conf").write_text(CONFIG.format(home=home, port=port, root=root))
    (home / "access.log").touch()
    for folder in [root, *root.parents, home, *home.parents]:  # a worker of nginx may be another user
        if str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    with running([NGINX, "-c", str(home / "nginx.conf"), "-p", str(home)], port):
        yield Served(f"http://127.0.0.1:{port}", root, home / "access.log")


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server: its endpoint."""
    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gs_server() -> Iterator[str]:
    """A server that speaks GCS's JSON API: its endpoint."""
    port = free_port()
    words = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    with running(words, port):
        yield f"http://127.0.0.1:{port}"


Fault = Callable[[str, int], str]  # (path, number of the request) -> "", "503", "429", "reset", "cut", "short", "stall", "slow"


class FaultyProxy:
    """An HTTP proxy in front of a server, which spoils the answers that `fault` names. `count` says how often it did what."""

    def __init__(self, upstream: str, fault: Fault) -> None:
        self.upstream, self.fault = upstream.removeprefix("http://"), fault
        self.count: Counter[str] = Counter()
        self._number = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # head and body in one packet: a second one would wait for the first one's receipt

            def do_GET(self) -> None:
                proxy.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self._number += 1
            kind = self.fault(request.path, self._number)
            self.count[kind] += 1
        if kind in ("503", "429"):
            request.send_response(int(kind))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if kind == "reset":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)  # not close: forked processes of the test hold it too
            return
        upstream = HTTPConnection(self.upstream, timeout=30)
        upstream.request(
            "GET", request.path, headers={k: v for k, v in request.headers.items() if k.lower() in ("range", "accept-encoding")}
        )
        answer = upstream.getresponse()
        body = answer.read()
        upstream.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("server", "date", "connection", "content-length"):
                request.send_header(name, value)
        half = body[: len(body) // 2]
        request.send_header("Content-Length", str(len(half if kind == "short" else body)))
        request.end_headers()
        if kind == "cut":
            request.wfile.write(half)
            request.close_connection = True
        elif kind == "stall":
            request.wfile.write(half)
            request.wfile.flush()
            time.sleep(30)
            request.close_connection = True
        elif kind == "slow":
            request.wfile.write(half)
            request.wfile.flush()
            time.sleep(0.3)
            request.wfile.write(body[len(half) :])
        else:
            request.wfile.write(half if kind == "short" else body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def drawn(shares: dict[str, float], seed: int = 0) -> Fault:
    """Faults with these shares, the same for each seed and order of requests."""
    rng = random.Random(seed)

    def fault(path: str, number: int) -> str:
        x = rng.random()
        for kind, share in shares.items():
            if x < share:
                return kind
            x -= share
        return ""

    return fault


@contextmanager
def faulty(upstream: str, fault: Fault) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream, fault)
    try:
        yield proxy
    finally:
        proxy.close()
