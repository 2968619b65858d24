"""What a person sees while it trains: a bar on a terminal, plain lines anywhere else.

in: the numbers of a log interval, an epoch or an evaluation  ->  out: text on the terminal, and the same in log.txt
Invariant: only the process that is `enabled` (rank 0) prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from data.errors import printable


def format_seconds(seconds: float) -> str:
    """A duration as 0:07, 12:34, 1:02:03 or 3d 04:05:06."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_result(
    *,
    num_samples: int,
    bad_samples: int,
    loss: float | None,
    top1: float | None,
    top5: float | None,
    correct: int,
    **more: float | None,
) -> str:
    """What an evaluation and a test tell alike: top-1 with its counts, top-5, loss; `more` may have "map"."""
    bad = f", {bad_samples:,} bad" if bad_samples else ""
    mean = f"mAP {format_share(more['map'])}, " if "map" in more else ""
    shares = f"top-1 {format_share(top1)} ({correct:,} of {num_samples:,}{bad}), top-5 {format_share(top5)}"
    return f"{shares}, {mean}loss {format_loss(loss)}"


def format_share(share: float | None) -> str:
    """A fraction in 0..1 as a percentage; "-" where no sample was good."""
    return "-" if share is None else f"{100 * share:.2f}%"


def format_rate(per_second: float) -> str:
    """Samples per second; large pictures on a CPU need the decimal."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def format_loss(loss: float | None) -> str:
    """A loss; "-" where no sample was good."""
    return "-" if loss is None else f"{loss:.4f}"


class Console:
    """The view of one run of `total` samples over `epochs` epochs, from position `start` on.

    `write_text` takes each line for log.txt. `terminal`: None asks stderr.
    """

    def __init__(
        self,
        *,
        total: int,
        epochs: int,
        start: int = 0,
        enabled: bool = True,
        write_text: Callable[[str], None] | None = None,
        terminal: bool | None = None,
    ) -> None:
        self.total = total
        self.epochs = epochs
        self.enabled = enabled
        self._write_text = write_text
        self._bar: Any = None
        if enabled and (sys.stderr.isatty() if terminal is None else terminal):
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of tqdm's in a process that forks loader workers
            self._bar = tqdm(total=total, initial=start, unit=" samples", unit_scale=True, dynamic_ncols=True)

    def line(self, text: str) -> None:
        """Print a line (above the bar, if there is one) and log it."""
        if not self.enabled:
            return
        text = printable(text)  # a class or a path may have a line end in its name
        encoding = sys.stdout.encoding or "utf-8"  # a path may hold what the terminal can't show
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        if self._bar is not None:
            self._bar.write(shown, file=sys.stdout)
        else:
            print(shown, flush=True)
        self._log(text)

    def advance(self, samples_seen: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(min(samples_seen, self.total) - self._bar.n)

    def train(
        self,
        *,
        epoch: int,
        step: int,
        samples_seen: int,
        loss: float | None,
        top1: float | None,
        lr: float,
        grad_norm: float,
        samples_per_second: float,
        data_wait: float,
        world_size: int = 1,
    ) -> None:
        """Show a log interval: `epoch` counted from 0, top1 and data_wait are shares; the speed is that of all processes."""
        if not self.enabled:
            return
        left = max(0, self.total - samples_seen)
        eta = format_seconds(left / samples_per_second) if samples_per_second > 0 else "-"
        where = f"epoch {min(epoch + 1, self.epochs)}/{self.epochs}"
        each = f" ({format_rate(samples_per_second / world_size)} a process)" if world_size > 1 else ""
        numbers = f"loss {format_loss(loss)}, top-1 {format_share(top1)}, lr {lr:.3g}, gradient norm {grad_norm:.3g}"
        numbers += f", {format_rate(samples_per_second)} samples/s{each}"
        waiting = f"waiting for data {100 * data_wait:.1f}%"
        text = f"{where}, step {step}: {numbers}, {waiting}, ETA {eta}"
        if self._bar is None:
            self.line(text)
            return
        self.advance(samples_seen)
        self._bar.set_description(where, refresh=False)
        self._bar.set_postfix_str(f"loss {format_loss(loss)}, top-1 {format_share(top1)}, {waiting}, ETA {eta}")
        self._log(text)

    def epoch(
        self,
        *,
        epoch: int,
        seen: int,
        distinct: int | None,
        repeated: int | None,
        missed: int | None,
        bad_samples: int,
        loss: float | None,
        top1: float | None,
        seconds: float,
        data_wait: float,
    ) -> None:
        """Show the sums of an epoch, counted from 0; seen counts bad samples too."""
        bad = f", {bad_samples:,} bad" if bad_samples else ""
        exact = "" if distinct is None else f", {distinct:,} distinct, {repeated:,} repeated, {missed:,} missed"
        self.line(
            f"epoch {epoch + 1}/{self.epochs} done: loss {format_loss(loss)}, top-1 {format_share(top1)},"
            f" {seen:,} samples seen{exact}{bad},"
            f" in {format_seconds(seconds)}, waiting for data {100 * data_wait:.1f}%"
        )

    def eval(self, *, epoch: int, **result: Any) -> None:
        """Show an evaluation."""
        self.line(f"epoch {epoch + 1}/{self.epochs} evaluation: {format_result(**result)}")

    def test(self, **result: Any) -> None:
        """Show the test."""
        self.line(f"test: {format_result(**result)}")

    def close(self) -> None:
        """Leave the bar as it stands; safe to call twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _log(self, text: str) -> None:
        if self._write_text is not None:
            self._write_text(text)
