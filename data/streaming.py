"""--stream: shards are read from end to end, as webdataset does it, where no index can be had; less is promised then.

in: URLs, paths and commands, the plan's empty slots  ->  out: the slots filled with the next samples of a shuffle buffer
Invariant: shards are dealt to ranks and workers without overlap, every pass in a new order, and steps are counted: every rank takes the
same number of them, and none waits for another. Not promised: each sample once an epoch, the same batches on other ranks, an exact
resume.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import remote
from .errors import ShardError
from .fetching import CHUNK
from .labels import LabelMap
from .patterns import expand, expand_braces
from .shards import Shard
from .stages import BatchPlan, RawBatch
from .tar import split_name
from .timing import READ, lap
from .urls import base_name, is_url, redact, redact_pattern

STDIN = "-"
GZIP = b"\x1f\x8b\x08"
BUFFER = 4096  # samples among which the next one is drawn
STREAM = 4  # purpose of a seed, beside those of plan.py and the trainer
_TOLERATED = 100  # shards in a row that can't be read, before it ends


def stream_sources(patterns: str | Sequence[str], allow_pipe: bool = False) -> list[str]:
    """Patterns -> paths, URLs and `pipe:` commands, or `-`, standard input. Raises ShardError; a command is one only where `allow_pipe` is
    given."""
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    if given == [STDIN]:
        return given
    found: list[str] = []
    for pattern in given:
        if pattern.startswith("pipe:") and allow_pipe:
            found += expand_braces(pattern, pattern)
        else:
            found += expand(pattern)
    return found


def check_sources(sources: Sequence[str]) -> None:
    """Raises ShardError for the first URL where nothing is (404), or what may not be read (403)."""
    remote.map_threads(remote.stat, [source for source in sources if is_url(source)])


def stand_in(patterns: str | Sequence[str], epoch_samples: int) -> Shard:
    """One shard that stands for the stream in plans and states: what an epoch is, is said, not known."""
    shown = redact_pattern([patterns] if isinstance(patterns, str) else list(patterns))
    return Shard("stream:" + "::".join(shown).replace("/", "|"), "stream", "", "", epoch_samples, 0)


def stream_labels(source: str, classes: Sequence[str] | None, num_classes: int | None) -> LabelMap:
    """The label map where nothing is looked at beforehand."""
    return LabelMap(source, num_classes or len(classes or ()), tuple(classes) if classes else None)


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Stage 2 of --stream, in place of `ReadSamples`. Sources may hold secrets, so they are not shown."""

    sources: tuple[str, ...] = field(repr=False)
    seed: int
    rank: int = 0
    world_size: int = 1
    buffer: int = BUFFER

    def of_rank(self, rank: int, world_size: int) -> ReadStream:
        """The part of one rank."""
        return replace(self, rank=rank, world_size=world_size)

    def __call__(self, plans: Iterable[BatchPlan]) -> Iterator[RawBatch]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        samples: Iterator[dict[str, Any]] | None = None
        handed_out = 0
        for plan in plans:
            if samples is None:  # another start draws in another order
                samples = self._shuffled(self.rank * num_workers + worker, self.world_size * num_workers, plan.step)
            raw = RawBatch(plan, [], [("", 0, "")] * len(plan.slots.shard), [])
            for slot in np.flatnonzero(plan.slots.valid).tolist():
                sample = next(samples, None)
                if sample is None:  # no other source ends
                    advice = "send more, or lower --epochs or --epoch-samples"
                    raise ShardError(f"--data -: standard input ended after {handed_out:,} samples, and the run asks for more: {advice}")
                handed_out += 1
                number = sample.pop("__index__")
                raw.ids[slot] = (base_name(redact(sample["__url__"])), number, sample["__key__"])
                raw.samples.append({**sample, "__slot__": slot})
            lap(READ)
            yield raw

    def _shuffled(self, reader: int, num_readers: int, step: int) -> Iterator[dict[str, Any]]:
        """The samples of this reader's shards, each drawn from a buffer that fills up as samples are handed out."""
        from webdataset import shuffle

        draw = random.Random(repr((self.seed, STREAM, step, reader)))
        return iter(shuffle(self.buffer, initial=min(64, self.buffer), rng=draw)(self._samples(reader, num_readers, step)))

    def _samples(self, reader: int, num_readers: int, step: int) -> Iterator[dict[str, Any]]:
        passes = num_read = 0
        while True:
            if passes and self.sources == (STDIN,):
                return
            before = num_read
            order = np.random.default_rng((self.seed, STREAM, step, passes)).permutation(len(self.sources))
            failed: list[str] = []
            for number in order[reader::num_readers].tolist():
                try:
                    for sample in read_shard(self.sources[number]):
                        num_read += 1
                        yield sample
                    failed.clear()
                except ShardError as error:
                    failed.append(str(error))
                    print(f"warning: {error}: the rest of this shard is left out of this pass", file=sys.stderr, flush=True)
                    if len(failed) >= _TOLERATED:
                        raise
            if num_read == before:
                raise ShardError(failed[0] if failed else "--stream: a reader has no samples: give it more shards, or use fewer --workers")
            passes += 1


def read_shard(source: str) -> Iterator[dict[str, Any]]:
    """The samples of one tar, as webdataset groups them; compressed ones, and several joined to one. Raises ShardError where it breaks
    off."""
    from webdataset.tariterators import group_by_keys

    name = redact(source)
    stream, process = _open(source)
    try:
        members = _members(stream, name)
        for number, sample in enumerate(group_by_keys(members, keys=lambda member: split_name(member) or (None, None))):
            yield {**sample, "__index__": number}
        while process is not None and stream.read(1 << 20):
            pass  # a command that can't write its last bytes would fail
        if process is not None and process.wait():
            raise ShardError(f"{name}: the command ended with {process.returncode}")
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        if isinstance(error, ShardError):
            raise
        if process is not None and process.wait():
            raise ShardError(f"{name}: the command ended with {process.returncode}") from None
        raise ShardError(f"{name}: can't be read to its end: {str(error)[:200] or type(error).__name__}") from None
    finally:
        stream.close()
        if process is not None:
            process.kill()
            process.wait()


def _members(stream: io.BufferedReader, name: str) -> Iterator[dict[str, Any]]:
    """The files of a tar as webdataset's `tar_file_expander` gives them, but beyond end blocks too: `cat a.tar b.tar` joins archives, and
    gzip files."""
    packed: Any = gzip.GzipFile(fileobj=stream) if stream.peek(len(GZIP)).startswith(GZIP) else stream
    with tarfile.open(fileobj=packed, mode="r|*", ignore_zeros=True, tarinfo=_Member) as tar:
        for member in tar:
            if member.isreg():
                file = tar.extractfile(member)
                assert file is not None
                yield {"fname": member.name, "data": file.read(), "__url__": name}
            tar.members = []  # type: ignore[attr-defined]  # or it keeps all that passed


class _Member(tarfile.TarInfo):
    """Beyond end blocks tarfile passes over what is no header: here that is damage."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tarfile_)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None


def _open(source: str) -> tuple[io.BufferedReader, subprocess.Popen[bytes] | None]:
    if source == STDIN:
        return open(os.dup(0), "rb"), None
    if source.startswith("pipe:"):
        process = subprocess.Popen(["/bin/sh", "-c", source.removeprefix("pipe:")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert isinstance(process.stdout, io.BufferedReader)
        return process.stdout, process
    if is_url(source):
        return io.BufferedReader(_Pieces(_in_order(source)), 1 << 20), None
    try:
        return open(source, "rb"), None
    except OSError as error:
        raise ShardError(f"{source}: can't be read: {error.strerror}") from None


def _in_order(url: str) -> Iterator[bytes]:
    """The bytes of a remote file: by ranges, each tried again where it fails, the next one on its way meanwhile. A server without
    ranges sends all in one go. Raises ShardError."""
    found = remote.stat(url)
    if not found.ranges:
        yield from remote.stream(url)
        return
    pool = ThreadPoolExecutor(1)
    coming: deque[Future[bytes]] = deque()
    try:
        for start in range(0, found.size, CHUNK):
            coming.append(pool.submit(remote.read, url, start, min(start + CHUNK, found.size), found.tag))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Pieces(io.RawIOBase):
    """A file to read from, over pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def check_readers(sources: Sequence[str], world_size: int, num_workers: int) -> None:
    """Raises ShardError where some reader would have no shard of its own."""
    readers = world_size * max(1, num_workers)
    if len(sources) >= readers:
        return
    shown = f"({world_size} processes with {max(1, num_workers)} workers each)"
    if sources == [STDIN]:
        advice = "one reads it: give --nproc-per-node 1 and -j 1, or several commands as pipe:COMMAND"
        raise ShardError(f"--data -: standard input can't be dealt to {readers} readers {shown}: {advice}")
    raise ShardError(
        f"--stream: {len(sources)} shards for {readers} readers {shown}: each needs one of its own: use fewer --workers, or more shards"
    )


PROMISE = (
    "--stream: shards are read from end to end, and equal steps on all ranks are promised; each sample once an epoch, the same batches "
    "on other numbers of "
    "processes, and resume at the exact sample are not"
)
