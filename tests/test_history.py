"""What a run folder tells: where each start's steps stand, its shards; and one line where it tells nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_maker import write_run

from engine.history import HistoryError, Start, read_history, read_manifest

ROOT = Path(__file__).resolve().parents[1]


def starts_of(folder: Path, *lines: dict[str, Any]) -> list[Start]:
    """The starts of a run over 100 samples and 2 epochs, whose metrics.jsonl has these lines."""
    if not folder.exists():
        write_run(folder, [("/a/0.tar", 100)], epochs=2)
    made = [{"event": "start", "num_samples": 100, "total_steps": 0, "world_size": 1, **line} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    return read_history(folder).starts


def test_starts_follow_each_other(tmp_path: Path) -> None:
    first, second, third = ({"samples_seen": p, "batch_size": b, "world_size": w} for p, b, w in ((0, 10, 1), (60, 7, 2), (100, 50, 3)))
    expected = [Start(0, 0, 60, 10, 1), Start(6, 60, 100, 7, 2), Start(12, 100, 200, 50, 3)]  # (100-60)/7: its last step was cut short
    assert starts_of(tmp_path / "run", first, second, third) == expected
    assert starts_of(tmp_path / "run", first, {**second, "step": 6}, {**third, "step": 12}) == expected
    history = read_history(tmp_path / "run")
    assert [history.start_of(step).batch_size for step in (1, 6, 7, 12, 13, 14, 99)] == [10, 10, 7, 7, 50, 50, 50]
    assert [history.start_of(step).position_after(step) for step in (1, 6, 7, 12, 14)] == [10, 60, 67, 100, 200]
    assert history.last_step == 14
    assert (history.plan(expected[1]).num_positions, history.plan(expected[2]).num_positions) == (100, 200)


def test_a_start_that_a_later_one_went_back_behind_counts_for_nothing(tmp_path: Path) -> None:
    first, killed, third = ({"samples_seen": p, "batch_size": b} for p, b in ((0, 10), (60, 7), (60, 5)))
    assert starts_of(tmp_path / "run", first, killed, third) == [Start(0, 0, 60, 10, 1), Start(6, 60, 200, 5, 1)]
    assert starts_of(tmp_path / "run", first, killed, {**third, "samples_seen": 40}) == [Start(0, 0, 40, 10, 1), Start(4, 40, 200, 5, 1)]
    assert starts_of(tmp_path / "run", first, killed, {**first, "batch_size": 4}) == [Start(0, 0, 200, 4, 1)]


def test_a_folder_begun_from_a_checkpoint_from_elsewhere(tmp_path: Path) -> None:
    line = {"samples_seen": 60, "batch_size": 7, "total_steps": 26}  # 140 samples are left: 20 steps
    assert starts_of(tmp_path / "run", line) == starts_of(tmp_path / "run", {**line, "step": 6}) == [Start(6, 60, 200, 7, 1)]


def test_what_the_last_lines_tell(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [("/a/0.tar", 100)], [(10, 1, 13)], val=[("/a/v.tar", 4)], status=None)
    history = read_history(folder)
    assert (history.told_step, history.ended, history.evaluations) == (10, False, {10: 4})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"event": "end", "status": "stopped", "steps": 13}\n')
        file.write('{"event": "sta')
    history = read_history(folder)
    assert (history.told_step, history.ended) == (13, True)


def test_manifest_paths_are_unescaped(tmp_path: Path) -> None:
    path = tmp_path / "shards.tsv"
    path.write_bytes(b"path\tsamples\tbytes\n/a\\tb\\nc\\\\t\\\\\t3\t1024\n/\xff\r\x0c.tar\t0\t9\n")
    rows = [(row.path, row.num_samples, row.num_bytes) for row in read_manifest(path)]
    assert rows == [("/a\tb\nc\\t\\", 3, 1024), ("/\udcff\r\x0c.tar", 0, 9)]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [("/a/0.tar", 100)])
    good = {name: (folder / name).read_text() for name in ("metrics.jsonl", "args.yaml", "shards.tsv")}
    start = json.loads(good["metrics.jsonl"].splitlines()[0])
    for name, text, message in [
        ("metrics.jsonl", "", "metrics.jsonl: no start line: this run has not begun a step"),
        ("metrics.jsonl", "x\n", "metrics.jsonl:1: not a JSON object: b'x"),
        ("metrics.jsonl", '{"event": "start"}\n', "metrics.jsonl: a line lacks a field or has a wrong one ('num_samples')"),
        ("metrics.jsonl", json.dumps({**start, "batch_size": "x"}) + "\n", "has a wrong one (batch_size is 'x')"),
        ("metrics.jsonl", json.dumps({**start, "batch_size": 0}) + "\n", "has a wrong one (batch_size is 0)"),
        ("metrics.jsonl", json.dumps({**start, "num_samples": 9}) + "\n", "shards.tsv lists 100 samples, metrics.jsonl tells of 9"),
        ("args.yaml", "a: [", "args.yaml: not YAML ("),
        ("args.yaml", "seed: x", "args.yaml: seed is missing or no whole number: not written by run.py?"),
        ("shards.tsv", "path\tsamples\tbytes\n/a/0.tar 3\n", "shards.tsv:2: not `path<tab>samples<tab>bytes`: '/a/0.tar 3'"),
    ]:
        (folder / name).write_text(text)
        with pytest.raises(HistoryError) as raised:
            read_history(folder)
        assert message in str(raised.value) and "\n" not in str(raised.value)
        (folder / name).write_text(good[name])
    for name in good:
        (folder / name).rename(folder / "away")
        with pytest.raises(HistoryError, match=f"{name}: can't be read .No such file or directory.: is .*run a run folder"):
            read_history(folder)
        (folder / "away").rename(folder / name)


def test_needs_no_torch() -> None:
    code = "import sys, engine.audit, engine.history; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "False\n"
