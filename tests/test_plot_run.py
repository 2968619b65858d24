"""plot_run.py draws runs that finished, were resumed, or have only begun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


def write(folder, events):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def events(epochs, evaluated=True):
    told: list[dict] = [{"event": "start", "num_samples": 100}]
    for epoch in range(epochs):
        for half in (0.5, 1):
            seen = int(100 * (epoch + half))
            speed = {"samples_per_second": 50.0, "data_time": 0.1, "step_time": 1}
            told.append({"event": "train", "samples_seen": seen, "loss": 2 / seen, **speed})
        told.append({"event": "epoch", "epoch": epoch, "loss": 1.0, "top1": epoch / 10})
        if evaluated:
            told.append({"event": "eval", "epoch": epoch, "loss": None, "top1": epoch / 12})
    return told


def plot(*words):
    program = [sys.executable, str(ROOT / "scripts" / "plot_run.py")]
    return subprocess.run([*program, *map(str, words)], capture_output=True, text=True, timeout=120)


def test_two_runs_in_one_picture_and_an_error_is_one_line(tmp_path):
    one, two = write(tmp_path / "one", events(4)), write(tmp_path / "two", events(1, evaluated=False))
    ran = plot(one, two)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, str(one / "plot.png"), "")
    with Image.open(one / "plot.png") as picture:
        assert picture.size == (1200, 800)
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50
    begun = write(tmp_path / "begun", events(0))
    nulls = write(tmp_path / "nulls", [{"event": "start", "num_samples": 10}, {"event": "epoch", "epoch": None, "top1": 0.5}])
    for folder, reason in (
        (nulls, "metrics.jsonl: a value is not a number (unsupported operand type(s) for +: 'NoneType' and 'int'): not written by run.py?"),
        (begun, f"{begun}: it has told nothing yet; a run does every --log-interval steps"),
        (tmp_path / "no", f"{tmp_path}/no/metrics.jsonl: can't be read (No such file or directory): is {tmp_path}/no a run folder?"),
    ):
        ran = plot(folder)
        assert (ran.returncode, ran.stderr) == (2, f"plot_run.py: error: {reason}\n")
