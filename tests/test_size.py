"""Much data, long runs and small machines: nothing grows, nothing is replayed, limits are kept or named."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_maker import encode
from tar_maker import END, join_samples

from data import Plan, build_loader, load_shards
from data.labels import LabelMap
from data.pipeline import PLANNED

ROOT = Path(__file__).resolve().parents[1]
LABELS = LabelMap("cls", 10)
LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc here")


def write(path: Path, num: int, first: int = 0, side: int = 8) -> Path:
    """A shard whose samples take 2,048 bytes each."""
    rng = np.random.default_rng(first)
    pictures = [encode(np.full((side, side, 3), rng.integers(0, 256, 3), np.uint8)) for _ in range(min(num, 50))]
    samples = [(f"{i:07d}", {"png": pictures[(i - first) % 50], "cls": b"%d" % (i % 10)}) for i in range(first, first + num)]
    path.write_bytes(join_samples(samples) + END)
    return path


def write_links(folder: Path, num_shards: int, num_samples: int, side: int = 8) -> str:
    """One shard and its index under many names; the pattern for them."""
    folder.mkdir()
    width = len(str(num_shards - 1))
    write(folder / f"{0:0{width}}.tar", num_samples, side=side)
    load_shards(str(folder))
    for i in range(1, num_shards):
        for ending in (".tar", ".tar.idx"):
            os.link(folder / f"{0:0{width}}{ending}", folder / f"{i:0{width}}{ending}")
    return f"{folder}/{{{0:0{width}}..{num_shards - 1}}}.tar"


# Long runs


def read_usage(pid: int | str) -> dict[str, int]:
    """What a process holds: open files, resident bytes, bytes of shared memory that it maps."""
    home = Path(f"/proc/{pid}")
    shared = 0
    for line in (home / "maps").read_text().splitlines():
        if "/dev/shm/" in line:
            start, end = line.split(maxsplit=1)[0].split("-")
            shared += int(end, 16) - int(start, 16)
    resident = int((home / "statm").read_text().split()[1]) * resource.getpagesize()
    return {"files": len(os.listdir(home / "fd")), "resident": resident, "shared": shared}


def usages(loader_start: set[Any]) -> list[dict[str, int]]:
    """Of this process and of the loader's workers."""
    workers = sorted(child.pid for child in set(multiprocessing.active_children()) - loader_start if child.pid)
    return [read_usage(pid) for pid in (os.getpid(), *workers)]


@LINUX
def test_nothing_grows_over_fifty_epochs(tmp_path: Path) -> None:
    for i in range(90):  # more than a worker keeps open
        write(tmp_path / f"{i:02d}.tar", 2, first=2 * i)
    others = set(multiprocessing.active_children())
    files_before = len(os.listdir("/proc/self/fd"))
    loader = build_loader(str(tmp_path), batch_size=18, epochs=50, num_workers=2, img_size=32, labels=LABELS)
    early: list[dict[str, int]] = []
    late: list[dict[str, int]] = []
    for batch in loader:
        assert batch["valid"].all()
        if batch["epoch_end"] and batch["epoch"][-1] == 4:
            early = usages(others)
        elif batch["epoch_end"] and batch["epoch"][-1] == 48:  # before the last: the workers are still at it
            late = usages(others)
    assert len(early) == len(late) == 3
    for a, b in zip(early, late, strict=True):
        assert b["files"] <= a["files"] + 16 and b["files"] < files_before + 130  # batches under way differ by a few
        assert b["resident"] <= a["resident"] + (12 << 20)
        assert b["shared"] <= a["shared"] + (2 << 20)
    del batch
    assert set(multiprocessing.active_children()) <= others
    end = time.monotonic() + 30  # the queues' threads close theirs a little later
    while len(os.listdir("/proc/self/fd")) > files_before + 3 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= files_before + 3


HELD = """
import sys
sys.path.insert(0, sys.argv[1])
from data import build_loader
batches = iter(build_loader(sys.argv[2], batch_size=2, epochs=99, num_workers=2, img_size=8, num_classes=10))
print(next(batches)["valid"].tolist())
"""


def test_a_program_ends_though_it_holds_an_iterator(tmp_path: Path) -> None:
    """Workers ignore SIGTERM: multiprocessing would wait for them at the end."""
    write(tmp_path / "0.tar", 20)
    done = subprocess.run([sys.executable, "-c", HELD, str(ROOT), str(tmp_path)], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, True]\n", "")


DEEP = """
import sys
sys.path.insert(0, sys.argv[1])
from data import LoaderError, build_loader
try:
    list(build_loader(sys.argv[2], batch_size=2, num_workers=1, img_size=512, num_classes=10))
except LoaderError as error:
    print(str(error).splitlines()[-1].partition(': ')[2])
"""


def test_a_batch_that_its_worker_can_not_send_stops_the_program(tmp_path: Path) -> None:
    """torch's workers make sockets below TMPDIR; without a word from the queue's thread the program would wait for ever."""
    write(tmp_path / "0.tar", 4)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    command = [sys.executable, "-c", DEEP, str(ROOT), str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(deep)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    line = "a loader worker can't hand over a batch (AF_UNIX path too long): mend that, or use no workers (-j 0)\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")


# Few file descriptors


def in_a_child(act: Callable[..., None], *args: Any) -> None:
    """Run in a forked process, for limits that this one could not lift again."""

    def run(sender: Any) -> None:
        try:
            act(*args)
            sender.send("")
        except BaseException:
            sender.send(traceback.format_exc())

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run, args=(sender,))
    process.start()
    sender.close()
    said = receiver.recv()
    process.join()
    assert not said, said


def read_with_few_files(pattern: str, num_workers: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    loader = build_loader(pattern, batch_size=50, epochs=1, num_workers=num_workers, img_size=8, num_classes=10)
    ids = [i for batch in loader for i, valid in zip(batch["ids"], batch["valid"].tolist(), strict=True) if valid]
    assert len({(name, index) for name, index, _ in ids}) == len(ids) == loader.num_samples == 2000


@LINUX
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_thousand_shards_with_256_file_descriptors(tmp_path: Path, num_workers: int) -> None:
    in_a_child(read_with_few_files, write_links(tmp_path / "shards", 2000, 1), num_workers)


def run_command(folder: Path, pattern: str, *words: Any, wrapper: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of run.py, with few file descriptors where there is no wrapper."""
    command = [*wrapper, sys.executable, ROOT / "run.py", "--data", pattern, "--model", "tiny", "--device", "cpu", "--epochs", 1,
               "--output", folder / "runs", *words]  # fmt: skip
    limit = None if wrapper else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, preexec_fn=limit, timeout=900)
    return done.returncode, done.stdout, done.stderr


@LINUX
@pytest.mark.full
def test_a_run_on_two_thousand_shards_with_256_file_descriptors(tmp_path: Path) -> None:
    pattern = write_links(tmp_path / "shards", 2000, 2)
    code, out, err = run_command(tmp_path, pattern, "--nproc-per-node", 2, "-j", 2, "-b", 64, "--img-size", 8)
    assert code == 0, err
    assert "4,000 samples seen, 4,000 distinct, 0 repeated, 0 missed" in out


# Little shared memory: what a container has unless it is given more


@pytest.fixture(scope="module")
def little_shared_memory() -> tuple[str, ...]:
    """The beginning of a command that sees 64 MB at /dev/shm."""
    wrapper = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    tried = subprocess.run([*wrapper, "true"], capture_output=True, text=True, check=False) if shutil.which("unshare") else None
    if tried is None or tried.returncode:
        reason = f"no mount namespace may be made here: {tried.stderr.strip() if tried else 'no unshare command'}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return wrapper


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from data import LoaderError, build_loader
print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
loader = build_loader(sys.argv[2], batch_size=int(sys.argv[3]), epochs=int(sys.argv[4]), num_workers=2, img_size=224, num_classes=10)
try:
    print(sum(int(batch["valid"].sum()) for batch in loader))
except LoaderError as error:
    print(str(error).splitlines()[-1])
"""


@pytest.mark.parametrize(
    ("batch_size", "said"),
    [
        (32, "1280"),  # 4.6 MiB a batch
        (256, "no shared memory left for a batch of 36.8 MiB (each worker holds up to three): enlarge /dev/shm (docker run --shm-size), "
         "or use fewer --workers or a smaller --batch-size"),
    ],
)  # fmt: skip
def test_shared_memory_of_64_mb(tmp_path: Path, little_shared_memory: tuple[str, ...], batch_size: int, said: str) -> None:
    write(tmp_path / "0.tar", 256)
    command = [*little_shared_memory, sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path), str(batch_size), "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    size, found = done.stdout.strip().splitlines()
    assert int(size) == 64 << 20
    assert said in found


@pytest.mark.full
def test_a_run_with_shared_memory_of_64_mb(tmp_path: Path, little_shared_memory: tuple[str, ...]) -> None:
    write(tmp_path / "0.tar", 512)
    code, out, err = run_command(tmp_path, str(tmp_path), "-j", 2, "-b", 32, wrapper=little_shared_memory)
    assert code == 0 and "512 samples seen, 512 distinct, 0 repeated, 0 missed" in out, err
    code, _, err = run_command(tmp_path, str(tmp_path), "-j", 2, "-b", 256, "--img-size", 224, wrapper=little_shared_memory)
    assert code == 1 and err.strip().splitlines()[-1].startswith("run.py: error: no shared memory left for a batch of 36.8 MiB"), err


# A million samples


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: what read and pread gave, cached or not


def start_at(pattern: str, samples_seen: int) -> tuple[int, int]:
    """(bytes read from nothing to the first batch, shards that the batch is from) of a resumed loader."""
    before = bytes_read()
    loader = build_loader(pattern, batch_size=256, epochs=2, img_size=8, labels=LABELS)
    loader.load_state_dict({**loader.state_dict(), "samples_seen": samples_seen})
    batch = next(iter(loader))
    cost = bytes_read() - before
    assert batch["valid"].all() and batch["epoch"].tolist() == [samples_seen // 1_000_000] * 256
    return cost, len({name for name, _, _ in batch["ids"]})


@LINUX
def test_a_resume_costs_the_same_anywhere_in_a_million_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_links(tmp_path / "shards", 100, 10_000)
    start_at(pattern, 0)  # imports read files too
    located: list[int] = []
    locate = Plan.locate

    def count(plan: Plan, position: np.ndarray) -> Any:
        located.append(len(position))
        return locate(plan, position)

    monkeypatch.setattr(Plan, "locate", count)
    costs = {}
    for share in (1, 99, 101):
        located.clear()
        costs[share], num_shards = start_at(pattern, share * 10_000)
        assert num_shards == 2  # a block of 16,384 samples lies in two shards at each of these places
        assert sum(located) == PLANNED  # the places of this batch and of some after it, and of none before it
    assert max(costs.values()) - min(costs.values()) < 8_192  # another thread of this process may read a little
    # besides the two shards' indexes and 256 samples of 2,048 bytes: each shard's index is looked at when the loader is built
    assert costs[1] < 100 * (80_008 + 8_192) + 2 * 80_008 + 256 * 2_048 + 100_000
