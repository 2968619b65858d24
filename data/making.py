"""Shards made from their plans, by several processes, each shard by one.

in: plans, a reader of pictures  ->  out: shards in the output folder, and a record of each
Invariant: the bytes of a shard depend on its plan alone; a worker ends when its parent does, however that ended.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .errors import DataError
from .output import Done, append_record
from .packing import ShardPlan, describe
from .pictures import check_picture, raw_picture, resize_picture
from .readers import FolderReader, TarReader, ZipReader
from .restarts import add_restarts
from .sources import suffix_of
from .tables import SourceError
from .video_files import VIDEO_SUFFIXES, check_video, resize_video
from .writer import ShardWriter


@dataclass(frozen=True, slots=True)
class ShardWork:
    """What is the same for all shards: where they go, how pictures are read and treated. Pickles; call it with a plan."""

    out: str
    journal: str  # "": whoever gets the record notes it
    reader: FolderReader | TarReader | ZipReader
    resize: int | None
    strict: bool
    resize_video: int | None = None
    restart_markers: bool = False
    raw: bool = False

    def __call__(self, plan: ShardPlan) -> Done:
        """Write one shard; pictures that can't be read are left out of it, or raise SourceError when `strict`."""
        return self.close(plan, *self.fill(plan))

    def fill(self, plan: ShardPlan) -> tuple[ShardWriter, list[tuple[str, str]], dict[str, int]]:
        """The shard with all its samples handed over, what is left out of it, and the JPEGs that got no restart markers, by reason."""
        left_out: list[tuple[str, str]] = []
        unmarked: Counter[str] = Counter()
        writer = ShardWriter(os.path.join(self.out, plan.path))
        try:
            for key, number, entry in plan.items:
                try:
                    data = self.reader.read(entry)
                    field, data = self._treat(entry.name, data, unmarked)
                except (DataError, OSError) as error:
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                    if self.strict:
                        raise SourceError(f"{entry.name}: {reason} (without --strict it would be left out)") from error
                    left_out.append((entry.name, reason))
                    continue
                writer.add(key, {field: data, "cls": b"%d" % number, "json": describe(entry)})
        except BaseException:
            writer.discard()
            raise
        return writer, left_out, dict(unmarked)

    def close(self, plan: ShardPlan, writer: ShardWriter, left_out: list[tuple[str, str]], unmarked: dict[str, int]) -> Done:
        """Wait until the disk has all of the shard, note it, and give it its name."""
        try:
            done = Done(writer.finish(), left_out, unmarked)
            if self.journal:
                append_record(self.journal, plan.path, done)  # before the shard appears: see ShardWriter
            writer.publish()
        except BaseException:
            writer.discard()
            raise
        return done

    def _treat(self, name: str, data: bytes, unmarked: Counter[str]) -> tuple[str, bytes]:
        """Field name and bytes to store. Raises DataError."""
        if suffix_of(name) in VIDEO_SUFFIXES:
            return resize_video(data, self.resize_video) if self.resize_video else (check_video(data), data)
        if self.raw:
            return raw_picture(data, self.resize)
        field, data = resize_picture(data, self.resize) if self.resize else (check_picture(data), data)
        if self.restart_markers:
            data, reason = add_restarts(data)
            if reason:
                unmarked[reason] += 1
        return field, data


def gather(results: Iterable[tuple[ShardPlan, Done]], total: int, ahead: int) -> dict[str, Done]:
    """What became of each plan; shows how many of `total` pictures (or videos) are through, `ahead` of them from an earlier run."""
    from tqdm import tqdm

    done = {}
    with tqdm(total=total, initial=ahead, unit=" samples", disable=None, file=sys.stderr) as progress:
        for plan, result in results:
            done[plan.path] = result
            progress.update(len(plan.items))
    return done


def make_here(work: ShardWork, plans: Sequence[ShardPlan], workers: int) -> Iterator[tuple[ShardPlan, Done]]:
    """Each plan with what became of it, as they end, made by processes of this machine."""
    workers = min(workers, len(plans))
    if workers <= 1:
        # the disk takes the end of one shard while the next is filled
        with concurrent.futures.ThreadPoolExecutor(1) as closing:
            before: tuple[ShardPlan, concurrent.futures.Future[Done]] | None = None
            for plan in plans:
                filled = work.fill(plan)
                if before:
                    yield before[0], before[1].result()
                before = plan, closing.submit(work.close, plan, *filled)
            if before:
                yield before[0], before[1].result()
        return
    # Where fork is safe it starts at once; spawned workers load everything again.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        futures = {pool.submit(work, plan): plan for plan in plans}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures.pop(future), future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; and a worker ends when its parent does, even one that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
