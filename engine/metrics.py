"""Counting what is right, and the files in which a run tells what it did.

in: logits, or the fields of an event  ->  out: counts; lines and scalars in the run folder
Invariant: a line is one write() to a file opened for appending, so a killed run loses at most its last line, and
processes that share a file don't mix theirs. A line that can't be written stops the run: holes prove nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# event -> its fields, besides "event"; start, eval, test and end may have more
EVENTS: dict[str, tuple[str, ...]] = {
    "start": ("world_size", "num_samples", "num_shards", "num_classes", "batch_size", "total_steps"),
    "train": ("epoch", "step", "samples_seen", "loss", "lr", "grad_norm", "samples_per_second", "data_time", "step_time", "memory"),
    "epoch": (
        "epoch", "step", "samples", "bad_samples", "seen", "distinct", "repeated", "missed", "loss", "top1", "seconds",
        "samples_per_second", "data_wait", "limits",
    ),
    "eval": ("epoch", "step", "num_samples", "loss", "top1", "top5", "correct"),
    "test": ("step", "num_samples", "bad_samples", "loss", "top1", "top5", "correct"),
    "end": ("status", "steps", "samples_seen"),
}  # fmt: skip
OPEN_EVENTS = ("start", "eval", "test", "end")
# event -> what TensorBoard shows of it
SCALARS: dict[str, tuple[str, ...]] = {
    "train": ("loss", "lr", "grad_norm", "samples_per_second"),
    "eval": ("loss", "top1", "top5"),
}
MAX_SHARED_LINE = 4096  # bytes: appends up to a page don't mix on any file system in use


def topk_correct(logits: Tensor, labels: Tensor, valid: Tensor, ks: Sequence[int]) -> Tensor:
    """Count the valid rows whose label is among the k largest logits: (n, classes), (n,), (n,) -> int64 (len(ks),).

    Labels may be 0 or 1 for each class, (n, classes): then a row counts where one of its labels is among them. A k above the number
    of classes counts as that number. Nothing leaves the device.
    """
    num_classes = logits.shape[1]
    order = logits.float().topk(min(max(ks), num_classes), dim=1).indices
    hits = (labels.gather(1, order) > 0 if labels.ndim == 2 else order == labels.unsqueeze(1)) & valid.unsqueeze(1)
    return torch.stack([hits[:, :k].any(1).sum() for k in ks])


def to_json(value: Any) -> Any:
    """Make a value fit for JSON: tensors become lists or numbers, NaN and infinities become null."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


class LineFile:
    """A text file that only grows, one whole line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, line: str) -> None:
        """Append the line. Raises OSError that names the file and the way on, for example when the disk is full."""
        data = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        try:
            while data:  # one write() unless the disk is nearly full; then the next one says why
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            advice = f"{error.strerror}; mend that, then go on with --resume auto"
            raise OSError(error.errno, advice, str(self.path)) from error

    def close(self) -> None:
        os.close(self._fd)


class RunLog:
    """The lines and scalars of one process; every process of a run has one, with its own rank.

    Rank 0 writes metrics, log.txt and TensorBoard; every rank writes its audit (if `audit`) and its bad samples.
    `resume_step`: the step of the checkpoint gone on from; TensorBoard then hides what an earlier start drew past it.
    """

    def __init__(self, folder: str | Path, rank: int, resume_step: int | None = None, audit: bool = False) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self._resume_step = resume_step
        self._files: dict[str, LineFile] = {}
        self._board: Any = None
        self._audit = audit

    def metric(self, event: str, **values: Any) -> None:
        """Write one event, with the fields that EVENTS says, to metrics.jsonl and TensorBoard (rank 0 only)."""
        names = set(EVENTS[event])
        assert names <= set(values) if event in OPEN_EVENTS else names == set(values), f"{event}: {sorted(values)}"
        if self.rank != 0:
            return
        line = to_json({"event": event, **values})
        self._write("metrics.jsonl", json.dumps(line, allow_nan=False))
        if event == "start":
            self._open_board()  # now: it takes seconds, which would count against the first interval's speed
        if event in SCALARS:
            board = self._open_board()
            for name in SCALARS[event]:
                if line[name] is not None:
                    board.add_scalar(f"{event}/{name}", line[name], line["step"])
            board.flush()  # what was drawn up to a checkpoint must outlive a kill right after it

    def audit(self, *, step: int, epoch: Any, ids: Iterable[Sequence[Any]], valid: Any, split: str = "train") -> None:
        """Write who was consumed in this step: ids are (shard file name, index, key) per slot, masked ones too.

        `step` is a training step for both splits, since cut_back goes by it: an evaluation's is the step it came after.
        """
        if self._audit:
            line = {"step": step, "epoch": to_json(epoch), "ids": list(ids), "valid": to_json(valid), "split": split}
            self._write(f"audit/rank{self.rank}.jsonl", json.dumps(line))

    def bad_sample(self, step: int, error: Mapping[str, Any]) -> None:
        """Append one SampleError.as_dict() to the bad_samples.jsonl that all ranks share."""
        self._write("bad_samples.jsonl", short_line({"step": step, "rank": self.rank, **error}))

    def pictures(self, name: str, images: Tensor, step: int) -> None:
        """Show pictures in TensorBoard: uint8 (n, 3, H, W) (rank 0 only)."""
        if self.rank == 0:
            self._open_board().add_images(name, images.cpu(), step)

    def text(self, line: str) -> None:
        """Append a line to log.txt, with the time before it (rank 0 only)."""
        if self.rank == 0:
            self._write("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def close(self) -> None:
        """Close all files; safe to call twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def cut_back(folder: str | Path, step: int) -> None:
        """See cut_back."""
        cut_back(folder, step)

    def _write(self, name: str, line: str) -> None:
        if name not in self._files:
            self._files[name] = LineFile(self.folder / name)
        self._files[name].write(line)

    def _open_board(self) -> Any:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import: on rank 0 only

            purge_step = None if self._resume_step is None else self._resume_step + 1
            self._board = SummaryWriter(str(self.folder), purge_step=purge_step)
        return self._board


def short_line(record: Mapping[str, Any]) -> str:
    """One JSON line under MAX_SHARED_LINE bytes: long texts (a key may be a path of any length) lose their ends."""
    line = json.dumps(to_json(record), allow_nan=False)
    limit = 1024
    while len(line) >= MAX_SHARED_LINE:
        limit //= 2
        shortened = {k: f"{v[:limit]}..." if isinstance(v, str) and len(v) > limit else v for k, v in record.items()}
        line = json.dumps(to_json(shortened), allow_nan=False)
    return line


def cut_back(folder: str | Path, step: int) -> None:
    """Drop the lines of steps after `step` from metrics, bad samples and every rank's audit; half-written lines go too.

    For one process, before any RunLog opens the folder. Lines without a step (start) stay.
    """
    folder = Path(folder)
    for path in [folder / "metrics.jsonl", folder / "bad_samples.jsonl"]:
        if path.exists():
            _rewrite(path, step)
    for path in sorted((folder / "audit").glob("rank*.jsonl")):
        _truncate(path, step)


def _keep(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    if not isinstance(record, dict):
        return False
    line_step = next((record[name] for name in ("step", "steps") if name in record), 0)  # start has none, end has steps
    return isinstance(line_step, int) and line_step <= step


def _rewrite(path: Path, step: int) -> None:
    """Keep the lines that belong; these files are small, and in bad_samples the ranks' steps may be mixed."""
    temporary = path.with_name(f"{path.name}.part")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        new.writelines(line for line in old if line.endswith(b"\n") and _keep(line, step))
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


def _truncate(path: Path, step: int, block_size: int = 1 << 20) -> None:
    """Cut an audit's tail: its steps only grow and it may be huge, so it is read from its end."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while True:
            cut = tail.rfind(b"\n")
            if start and (cut < 0 or tail.rfind(b"\n", 0, cut) < 0):  # no whole line in hand: read more
                size = min(block_size, start)
                start -= size
                file.seek(start)
                tail = file.read(size) + tail
                continue
            begin = tail.rfind(b"\n", 0, max(cut, 0)) + 1
            if cut < 0 or _keep(tail[begin : cut + 1], step):
                file.truncate(start + cut + 1)
                return
            tail = tail[:begin]
