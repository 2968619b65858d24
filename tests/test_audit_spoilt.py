"""scripts/audit.py on spoilt runs: each way to spoil an audit is told, with its figures, and exit status 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_maker import change_lines, write_run

from scripts import audit


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """3 epochs of 57 samples on 3 ranks, 10 a step; evaluations of 21."""
    shards = [(f"/data/{number}.tar", size) for number, size in enumerate((7, 5, 3, 1, 0, 41))]
    return write_run(tmp_path / "run", shards, [(10, 3, None)], val=[("/data/val/0.tar", 9), ("/data/val/1.tar", 12)])


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What it says of a run that is not exact."""
    assert audit.main([str(folder)]) == 1
    out, err = capsys.readouterr()
    assert not err
    return out


# what is done to rank 1's lines -> the line of an epoch or evaluation, and the findings
SPOILT: dict[str, tuple[Callable, str, list[str]]] = {}


def spoilt(case: str, expected: str, *findings: str) -> Callable:
    def add(change: Callable) -> Callable:
        SPOILT[case] = change, expected, list(findings)
        return change

    return add


@spoilt(
    "a line dropped",
    "train epoch 0 (57 samples): 54 seen, 54 distinct, 0 repeated, 3 missed",
    "uneven: step 2: no line of rank 1",
    "missed: train epoch 0: 3 samples (3 in all)",
)
def drop(lines: list) -> None:
    del lines[1]


@spoilt(
    "a line repeated",
    "train epoch 0 (57 samples): 60 seen, 57 distinct, 3 repeated, 0 missed",
    "uneven: step 2: 2 lines of rank 1",
    "repeated: train epoch 0: 3 samples (3 in all)",
)
def repeat(lines: list) -> None:
    lines.insert(1, lines[1])


@spoilt(
    "an old line again, in a later epoch",
    "train epoch 0 (57 samples): 60 seen, 57 distinct, 3 repeated, 0 missed",
    "out of order: after step 10: a line of an earlier one, of rank 1",
    "repeated: train epoch 0: 3 samples (3 in all)",
)
def go_back(lines: list) -> None:
    lines.insert(1 + next(i for i, line in enumerate(lines) if line["step"] == 10), lines[1])


@spoilt(
    "the last line lost, of a run that ended",
    "train epoch 2 (57 samples): 57 seen, 57 distinct, 0 repeated, 0 missed",  # rank 0 had the one sample that was left
    "uneven: step 18: no line of rank 1",
)
def lose_end(lines: list) -> None:
    del lines[[line["step"] for line in lines].index(18)]


@spoilt(
    "a sample in another's place",
    "train epoch 0 (57 samples): 57 seen, 56 distinct, 1 repeated, 1 missed",
    "repeated: train epoch 0: 1 samples",
    "missed: train epoch 0: 1 samples",
)
def replace(lines: list) -> None:
    lines[0]["ids"][0] = lines[1]["ids"][0]


@spoilt(
    "a sample masked without a reason",
    "train epoch 0 (57 samples): 56 seen, 56 distinct, 0 repeated, 1 missed",
    "masked: step 2: rank 1: ['",
    "missed: train epoch 0: 1 samples",
)
def mask(lines: list) -> None:
    lines[1]["valid"][0] = False


@spoilt(
    "a sample of no shard, and one past a shard's end",
    "train epoch 0 (57 samples): 57 seen, 55 distinct, 0 repeated, 2 missed",
    "unknown: step 1: no shard holds ['6.tar', 0, 'x'] (2 in all)",
)
def invent(lines: list) -> None:
    lines[0]["ids"][:2] = [["6.tar", 0, "x"], ["0.tar", 7, "x"]]


@spoilt(
    "a padded slot that counts",
    "train epoch 0 (57 samples): 58 seen, 57 distinct, 1 repeated, 0 missed",
    "repeated: train epoch 0: 1 samples",
)
def count_padding(lines: list) -> None:
    lines[0]["valid"][-1] = True


@spoilt(
    "a sample past the last epoch that counts",
    "train epoch 2 (57 samples): 57 seen, 57 distinct, 0 repeated, 0 missed",
    "past the end: step 18: a sample of epoch 3 counts",
)
def go_on(lines: list) -> None:
    (line,) = (line for line in lines if line["step"] == 18 and line["split"] == "train")
    line["valid"][line["epoch"].index(3)] = True


@spoilt(
    "a slot too many",
    "train epoch 0 (57 samples): 58 seen, 57 distinct, 1 repeated, 0 missed",
    "uneven: step 2: rank 1 has 5 slots, not 4",
)
def add_slot(lines: list) -> None:
    for name in "ids", "epoch", "valid":
        lines[1][name].insert(0, lines[1][name][0])


@spoilt(
    "a batch of an evaluation lost",
    "evaluation after step 12 (21 samples): 18 seen, 18 distinct, 0 repeated, 3 missed",
    "uneven: evaluation after step 12, batch 2: no line of rank 1",
    "evaluation differs: evaluation after step 12: its result is of 21 samples, its audit of 18",
)
def lose_evaluation(lines: list) -> None:
    del lines[[(line["step"], line["split"]) for line in lines].index((12, "val"))]


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_run(case: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, expected, findings = SPOILT[case]
    path = run_folder / "audit" / "rank1.jsonl"
    before = path.read_text()
    change_lines(path, change)
    assert path.read_text() != before
    out = check(run_folder, capsys)
    assert expected in out
    told = out[out.index("not exact:\n") :]
    for finding in findings:
        assert f"  {finding}" in told


def test_whole_steps_and_ranks_lost(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lost, findings in [
        ("middle", range(4, 6), ["steps missing: 4..5 (2 in all)", "missed: train epoch 0: 20 samples (20 in all)"]),
        ("begin", range(1, 4), ["steps missing: 1..3 (3 in all)", "missed: train epoch 0: 30 samples (30 in all)"]),
        ("end", range(17, 19), ["steps missing: 17..18, which metrics.jsonl tells of (2 in all)", "missed: train epoch 2: 11 samples"]),
    ]:
        folder = shutil.copytree(run_folder, tmp_path / name)
        for path in (folder / "audit").iterdir():
            kept = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] not in lost]
            path.write_text("".join(kept))
        out = check(folder, capsys)
        assert all(f"  {finding}" in out for finding in findings), out
    (run_folder / "audit" / "rank2.jsonl").rename(run_folder / "audit" / "rank5.jsonl")
    out = check(run_folder, capsys)
    assert "uneven: step 1: no line of rank 2 (54 in all)" in out  # lacking ones, and as many of a rank 5
