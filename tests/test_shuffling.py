"""data/shuffling.py: what a block does to the order of samples; and scripts/shuffle_report.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tar_maker as tm

from data.plan import Plan
from data.shuffling import READ_AHEAD, Stored, blocks_around, measure
from scripts import shuffle_report

ROOT = Path(__file__).resolve().parents[1]
COUNTS = np.array([500] * 40)
TOTAL = 20_000


def stored(size: int = 4096, classes: int = 20) -> Stored:
    """Sorted by class, as class folders would be without a shuffle."""
    index = np.arange(TOTAL)
    return Stored(index // 500, index % 500 * size, np.full(TOTAL, size), index * classes // TOTAL)


def test_a_full_permutation_is_ideal() -> None:
    quality = measure(Plan(COUNTS, shuffle_block=TOTAL), stored(), 256)
    assert quality.displacement == pytest.approx(1 / 3, abs=0.01)
    assert quality.mix == pytest.approx(1, abs=0.01) and quality.class_gap == pytest.approx(quality.ideal_class_gap, abs=0.01)
    assert quality.classes == pytest.approx(20, abs=0.1)
    assert quality.shards > 39 and quality.window_bytes == TOTAL * 4096 == 4096 * COUNTS.sum()
    assert quality.batch_bytes == 256 * 4096 and READ_AHEAD * 150 < quality.read_bytes < READ_AHEAD * 257


def test_no_shuffle_is_the_worst() -> None:
    quality = measure(Plan(COUNTS, shuffle=False), stored(), 250)
    assert quality.displacement == 0 and quality.classes == 1 and quality.mix < 0.1
    assert quality.shards == 1 and quality.read_bytes < 1.3 * quality.batch_bytes


def test_blocks_and_lanes_lie_between() -> None:
    mixes = [measure(Plan(COUNTS, shuffle_block=block), stored(), 256).mix for block in (300, 1000, 4000, TOTAL)]
    assert mixes == sorted(mixes) and mixes[0] < 0.25 and mixes[-1] > 0.98
    one, four = (measure(Plan(COUNTS, shuffle_block=1000, lanes=lanes), stored(), 256) for lanes in (1, 4))
    assert four.mix > one.mix + 0.2 and four.window_bytes == 4 * one.window_bytes
    assert four.shards > one.shards


def test_the_distance_between_neighbours_is_what_is_told() -> None:
    plan = Plan(COUNTS, shuffle_block=1000)
    sample = plan.locate(np.arange(TOTAL)).sample
    place = np.empty(TOTAL, np.int64)
    place[sample] = np.arange(TOTAL)
    apart = np.abs(np.diff(place))
    within = apart[apart < 1000]  # the others stand in two blocks
    assert measure(plan, stored(), 256).apart == pytest.approx(within.mean(), rel=0.05)


def test_the_blocks_that_are_compared() -> None:
    assert blocks_around(16_384, 10**6) == [1024, 4096, 16_384, 65_536, 262_144, 10**6]
    assert blocks_around(16_384, 1000) == [1000]
    assert blocks_around(1, 10) == [1, 4, 10]


def test_a_small_set_without_labels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tm.write_shard(tmp_path / "0.tar", 30)
    assert shuffle_report.main([str(tmp_path), "-b", "8", "--label", "txt", "--plot", str(tmp_path / "plot.png")]) == 0
    out = capsys.readouterr().out
    assert "30 samples in 1 shard" in out and "no sample has a label in 'txt'" in out
    assert "A larger block changes nothing: all samples are permuted together already." in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(4):
        samples = [(f"{number}_{i:03d}", {"txt": b"x", "cls": b"%d" % number}) for i in range(100)]
        (tmp_path / f"{number}.tar").write_bytes(tm.join_samples(samples) + tm.END)
    assert shuffle_report.main([str(tmp_path), "-b", "20", "--shuffle-block", "80", "-j", "1"]) == 0
    out = capsys.readouterr().out
    assert "400 samples in 4 shards, 800.0 KiB; batches of 20, 1 lane" in out
    assert " 80* " in out and "A smaller block of 20 costs " in out and "A larger block of 320 gives " in out
    assert "neighbours in a tar end up about 27 samples apart (a full permutation: 133)" in out

    assert shuffle_report.main([str(tmp_path), "--lanes", "1000"]) == 2
    assert shuffle_report.main([str(tmp_path / "none")]) == 2
    assert shuffle_report.main([str(tmp_path), "--label", "x"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 3 and err.count("shuffle_report.py: error: ") == 3 and "lanes is 1000" in err
    done = subprocess.run([sys.executable, str(ROOT / "scripts/shuffle_report.py"), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert "examples:\n  python scripts/shuffle_report.py" in done.stdout
