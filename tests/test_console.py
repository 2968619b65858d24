"""What the console prints: lines without a terminal, a bar with one, and nothing on other ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from engine.console import Console, format_seconds, format_share

INTERVAL: dict[str, Any] = {
    "epoch": 0, "step": 50, "samples_seen": 500, "loss": 1.25, "top1": 0.5, "lr": 0.1, "grad_norm": 2.5,
    "samples_per_second": 25.0, "data_wait": 0.031,
}  # fmt: skip
EPOCH: dict[str, Any] = {
    "epoch": 1, "seen": 1000, "distinct": 1000, "repeated": 0, "missed": 0, "bad_samples": 0, "loss": 0.5,
    "top1": 0.751, "seconds": 61.2, "data_wait": 0.2,
}  # fmt: skip
EVAL: dict[str, Any] = {"epoch": 1, "num_samples": 2000, "bad_samples": 0, "loss": 0.5, "top1": 0.9, "top5": 1.0, "correct": 1800}


def test_durations_and_shares() -> None:
    texts = [format_seconds(s) for s in (0, 7.4, 754, 3723, 273_906, -3)]
    assert texts == ["0:00", "0:07", "12:34", "1:02:03", "3d 04:05:06", "0:00"]
    assert format_share(0.9875) == "98.75%" and format_share(1.0) == "100.00%"


def test_without_a_terminal_every_interval_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []
    console = Console(total=2000, epochs=2, write_text=logged.append, terminal=False)
    console.line("global batch 256 = 4 x 64")
    console.advance(490)
    console.train(**INTERVAL)
    console.epoch(**EPOCH)
    console.eval(**EVAL)
    console.close()
    out, err = capsys.readouterr()
    assert out.splitlines() == logged == [
        "global batch 256 = 4 x 64",
        "epoch 1/2, step 50: loss 1.2500, top-1 50.00%, lr 0.1, gradient norm 2.5, 25.0 samples/s, waiting for data 3.1%, ETA 1:00",
        "epoch 2/2 done: loss 0.5000, top-1 75.10%, 1,000 samples seen, 1,000 distinct, 0 repeated, 0 missed, in 1:01,"
        " waiting for data 20.0%",
        "epoch 2/2 evaluation: top-1 90.00% (1,800 of 2,000), top-5 100.00%, loss 0.5000",
    ]
    assert err == ""


def test_names_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []
    console = Console(total=1, epochs=1, write_text=logged.append, terminal=False)
    console.line("2 classes (big\ncat, caf\udce9 \x1b[2J)")
    assert capsys.readouterr().out.splitlines() == logged == ["2 classes (big\\ncat, caf\\udce9 \\x1b[2J)"]


def test_bad_samples_are_counted_beside_the_good(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total=2000, epochs=2, terminal=False)
    console.epoch(**{**EPOCH, "bad_samples": 3})
    console.eval(**{**EVAL, "bad_samples": 4})
    first, second = capsys.readouterr().out.splitlines()
    assert "1,000 samples seen, 1,000 distinct, 0 repeated, 0 missed, 3 bad, in 1:01" in first
    assert "(1,800 of 2,000, 4 bad)" in second


def test_nothing_to_average_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total=2000, epochs=2, terminal=False)
    console.train(**{**INTERVAL, "loss": None, "top1": None, "samples_per_second": 0.0})
    assert "loss -, top-1 -, lr 0.1, gradient norm 2.5, 0.0 samples/s, waiting for data 3.1%, ETA -" in capsys.readouterr().out


def test_on_a_terminal_there_is_a_bar_and_the_log_has_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []
    console = Console(total=2000, epochs=2, start=400, write_text=logged.append, terminal=True)
    console.advance(450)
    console.train(**INTERVAL)
    console.line("a line")
    console.advance(9999)
    console.close()
    console.close()
    out, err = capsys.readouterr()
    assert "a line" in out and "step 50" not in out
    assert "epoch 1/2" in err and "loss 1.2500" in err and "top-1 50.00%" in err and "waiting for data 3.1%" in err
    assert "2.00k/2.00k" in err  # not past the end
    assert [line.split(",")[0] for line in logged] == ["epoch 1/2", "a line"]


def test_the_terminal_is_asked_by_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Console(total=10, epochs=1).close()
    assert "samples" in capsys.readouterr().err


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []
    console = Console(total=2000, epochs=2, enabled=False, write_text=logged.append, terminal=True)
    console.line("x")
    console.advance(5)
    console.train(**INTERVAL)
    console.epoch(**EPOCH)
    console.eval(**EVAL)
    console.close()
    assert capsys.readouterr() == ("", "") and logged == []


def test_a_full_disk_is_not_swallowed() -> None:
    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Console(total=10, epochs=1, write_text=full, terminal=False).line("x")


def test_a_path_that_is_not_text_is_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Console(total=10, epochs=1, terminal=False).line("runs/\udcff")
    assert capsys.readouterr().out == "runs/\\udcff\n"
