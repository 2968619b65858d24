"""Counting, the lines of a run folder, and cutting them back to a checkpoint's step."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine import metrics
from engine.metrics import EVENTS, LineFile, RunLog, cut_back, topk_correct

# What a run leaves: the fields that readers of metrics.jsonl count on. Change it only with every reader.
PUBLISHED = {
    "start": "world_size num_samples num_shards num_classes batch_size total_steps",
    "train": "epoch step samples_seen loss lr grad_norm samples_per_second data_time step_time memory",
    "epoch": "epoch step samples bad_samples seen distinct repeated missed loss top1 seconds samples_per_second data_wait limits",
    "eval": "epoch step num_samples loss top1 top5 correct",
    "test": "step num_samples bad_samples loss top1 top5 correct",
    "end": "status steps samples_seen",
}
ERROR = {"shard": "000.tar", "index": 3, "key": "a/b", "field": "jpg", "reason": "cut short"}


def fields(event: str, **changes: Any) -> dict[str, Any]:
    return {name: "done" if name == "status" else 1 for name in PUBLISHED[event].split()} | changes


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_topk_counts_valid_rows_only() -> None:
    logits = torch.tensor([[9.0, 5, 1], [9, 5, 1], [9, 5, 1], [9, 5, 1]])
    labels = torch.tensor([0, 1, 2, 0])
    assert topk_correct(logits, labels, torch.ones(4, dtype=torch.bool), (1, 2)).tolist() == [2, 3]
    assert topk_correct(logits, labels, torch.tensor([True, True, True, False]), (1, 2)).tolist() == [1, 2]
    counts = topk_correct(logits, labels, torch.zeros(4, dtype=torch.bool), (1, 5))
    assert counts.tolist() == [0, 0] and counts.dtype == torch.int64


def test_top5_of_three_classes_is_all() -> None:
    assert topk_correct(torch.randn(6, 3), torch.arange(6) % 3, torch.ones(6, dtype=torch.bool), (1, 5))[1] == 6


def test_equal_logits_count_one_class_only() -> None:
    # a network that says nothing must not score 100 %
    logits = torch.zeros(10, 10, dtype=torch.bfloat16)
    assert topk_correct(logits, torch.arange(10), torch.ones(10, dtype=torch.bool), (1, 5)).tolist() == [1, 5]


def test_the_fields_of_events_are_the_published_ones(tmp_path: Path) -> None:
    assert {event: " ".join(names) for event, names in EVENTS.items()} == PUBLISHED
    with RunLog(tmp_path, rank=0) as log:
        for event in PUBLISHED:
            log.metric(event, **fields(event))
        log.metric("start", **fields("start", model="tiny"))
        for wrong in (fields("train", top1=1), {"epoch": 1}):
            with pytest.raises(AssertionError, match="^train: "):
                log.metric("train", **wrong)
    lines = read(tmp_path / "metrics.jsonl")
    assert [" ".join(list(line)[1:]) for line in lines] == [*PUBLISHED.values(), PUBLISHED["start"] + " model"]
    assert [line["event"] for line in lines] == [*PUBLISHED, "start"]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=0) as log:
        log.metric("train", **fields("train", loss=math.nan, lr=math.inf, data_time=torch.tensor(0.5)))
        log.metric("end", **fields("end", best={"top1": math.nan, "epochs": (1, -math.inf)}))
    train, end = read(tmp_path / "metrics.jsonl")
    assert (train["loss"], train["lr"], train["data_time"]) == (None, None, 0.5)
    assert end["best"] == {"top1": None, "epochs": [1, None]}


def test_a_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    log = RunLog(tmp_path, rank=0, audit=True)
    log.metric("end", **fields("end"))
    log.audit(step=1, epoch=torch.tensor([0]), ids=[("000.tar", 0, "a")], valid=torch.tensor([True]))
    log.bad_sample(1, ERROR)
    log.text("hello")
    for name in ("metrics.jsonl", "audit/rank0.jsonl", "bad_samples.jsonl", "log.txt"):
        assert (tmp_path / name).read_text().endswith("\n"), name
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d hello\n", (tmp_path / "log.txt").read_text())
    log.close()
    log.close()


def test_the_audits_line(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=2, audit=True) as log:
        ids = [("000.tar", 7, "a/\udcffb"), ("001.tar", 0, "c")]
        log.audit(step=4, epoch=torch.tensor([0, 1]), ids=ids, valid=torch.tensor([True, False]))
        log.audit(step=4, epoch=[0], ids=[["v.tar", 1, "d"]], valid=[True], split="val")
    text = (tmp_path / "audit" / "rank2.jsonl").read_text(encoding="ascii")
    assert text.splitlines()[0] == (
        '{"step": 4, "epoch": [0, 1], "ids": [["000.tar", 7, "a/\\udcffb"], ["001.tar", 0, "c"]], "valid": [true, false], "split": "train"}'
    )
    assert read(tmp_path / "audit" / "rank2.jsonl")[1] == {
        "step": 4, "epoch": [0], "ids": [["v.tar", 1, "d"]], "valid": [True], "split": "val",
    }  # fmt: skip


def test_other_ranks_write_their_audit_and_bad_samples_only(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=1, audit=True) as log:
        log.metric("start", **fields("start"))
        log.metric("train", **fields("train"))
        log.text("x")
        log.bad_sample(3, ERROR)
        log.audit(step=1, epoch=[0], ids=[["a", 0, "b"]], valid=[True])
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["bad_samples.jsonl", "rank1.jsonl"]
    assert read(tmp_path / "bad_samples.jsonl") == [{"step": 3, "rank": 1, **ERROR}]


def test_no_audit_unless_asked(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=0) as log:
        log.audit(step=1, epoch=[0], ids=[["a", 0, "b"]], valid=[True])
    assert list(tmp_path.iterdir()) == []


def write_bad_samples(folder: Path, rank: int) -> None:
    with RunLog(folder, rank) as log:
        for step in range(200):
            log.bad_sample(step, {**ERROR, "reason": f"{rank}" * 2000})


def test_processes_that_share_a_file_do_not_mix_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_bad_samples, args=(tmp_path, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = read(tmp_path / "bad_samples.jsonl")
    for rank in range(3):
        mine = [line for line in lines if line["rank"] == rank]
        assert [line["step"] for line in mine] == list(range(200))
        assert {line["reason"] for line in mine} == {f"{rank}" * 2000}


def test_a_bad_samples_line_is_short_however_long_its_key(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=0) as log:
        log.bad_sample(1, {"shard": "s" * 255, "index": 1, "key": "\u00e9" * 60_000, "field": "f" * 9000, "reason": "\U0001f600" * 5000})
        log.bad_sample(2, {**ERROR, "key": "k" * 3000})
    long, short = (tmp_path / "bad_samples.jsonl").read_bytes().splitlines()
    assert len(long) < 4096
    assert json.loads(long)["index"] == 1 and json.loads(long)["key"].startswith("\u00e9" * 50)
    assert json.loads(short)["key"] == "k" * 3000


def test_a_full_disk_stops_the_run_and_names_the_file() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = LineFile(full)
    with pytest.raises(OSError, match=r"No space left on device; mend that, then go on with --resume auto: '/dev/full'") as caught:
        file.write("x")
    assert "\n" not in str(caught.value)
    file.close()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = metrics.os.write
    monkeypatch.setattr(metrics.os, "write", lambda fd, data: write(fd, data[:3]))
    file = LineFile(tmp_path / "x")
    file.write("a longer line")
    file.close()
    assert (tmp_path / "x").read_text() == "a longer line\n"


def test_cutting_back_drops_what_came_after_the_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunLog(tmp_path, rank, audit=True) as log:
            log.metric("start", **fields("start"))
            for step in range(1, 6):
                log.metric("train", **fields("train", step=step))
                log.audit(step=step, epoch=[0], ids=[["a", step, "b"]], valid=[True])
                log.bad_sample(step, ERROR)
            log.audit(step=5, epoch=[0], ids=[["v", 0, "b"]], valid=[True], split="val")
            log.metric("end", **fields("end", steps=5))
            log.text("stays")
    cut_back(tmp_path, 3)
    lines = read(tmp_path / "metrics.jsonl")
    assert [(line["event"], line.get("step")) for line in lines] == [("start", None), ("train", 1), ("train", 2), ("train", 3)]
    for rank in (0, 1):
        assert [line["step"] for line in read(tmp_path / f"audit/rank{rank}.jsonl")] == [1, 2, 3]
    assert [(line["rank"], line["step"]) for line in read(tmp_path / "bad_samples.jsonl")] == [(r, s) for r in (0, 1) for s in (1, 2, 3)]
    assert "stays" in (tmp_path / "log.txt").read_text()
    assert not list(tmp_path.rglob("*.part"))


def test_cutting_back_keeps_the_end_of_a_run_that_stopped_there(tmp_path: Path) -> None:
    with RunLog(tmp_path, 0) as log:
        log.metric("end", **fields("end", status="stopped", steps=5))
    cut_back(tmp_path, 5)
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_cutting_back_a_folder_without_logs_and_twice(tmp_path: Path) -> None:
    cut_back(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    with RunLog(tmp_path, 0, audit=True) as log:
        log.audit(step=4, epoch=[0], ids=[["a", 0, "b"]], valid=[True])
        log.bad_sample(4, ERROR)
    for _ in range(2):
        cut_back(tmp_path, 3)
        assert (tmp_path / "audit/rank0.jsonl").read_bytes() == (tmp_path / "bad_samples.jsonl").read_bytes() == b""


@pytest.mark.parametrize("rest", [b'{"step": 2, "ep', b'{"step": 2}', b"\n", b"\0\0\0\0", b'[2]\n"x"\n7\n', b'{"step": "2"}\n'])
def test_cutting_back_drops_a_half_written_end(tmp_path: Path, rest: bytes) -> None:
    whole = b'{"step": 1, "split": "train"}\n'
    (tmp_path / "audit").mkdir()
    paths = [tmp_path / name for name in ("metrics.jsonl", "bad_samples.jsonl", "audit/rank0.jsonl")]
    for path in paths:
        path.write_bytes(whole + rest)
    cut_back(tmp_path, 10)
    for path in paths:
        assert path.read_bytes() == whole, path


@given(
    steps=st.lists(st.integers(0, 9)).map(sorted),
    widths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    tail=st.sampled_from([b"", b"{", b'{"step": 0}']),
    step=st.integers(-1, 10),
    block_size=st.integers(1, 70),
)
def test_cutting_from_the_end_keeps_what_a_filter_keeps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], widths: list[int], tail: bytes, step: int, block_size: int
) -> None:
    path = tmp_path_factory.mktemp("audit") / "rank0.jsonl"
    lines = [json.dumps({"step": s, "x": "y" * widths[i % len(widths)]}).encode() + b"\n" for i, s in enumerate(steps)]
    path.write_bytes(b"".join(lines) + tail)
    metrics._truncate(path, step, block_size)
    assert path.read_bytes() == b"".join(line for line, s in zip(lines, steps, strict=True) if s <= step)


def test_cutting_a_large_audit_reads_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audit").mkdir()
    path = tmp_path / "audit/rank0.jsonl"
    path.write_text("".join(f'{{"step": {step}, "ids": "{"x" * 1000}"}}\n' for step in range(20_000)))
    judged = []
    keep = metrics._keep

    def counting(line: bytes, step: int) -> bool:
        judged.append(line)
        return keep(line, step)

    monkeypatch.setattr(metrics, "_keep", counting)
    cut_back(tmp_path, 19_990)
    assert len(judged) == 10
    assert path.read_text().count("\n") == 19_991


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_shows_one_curve_over_a_resume(tmp_path: Path) -> None:
    first = RunLog(tmp_path, rank=0)
    first.metric("start", **fields("start"))
    for step in (1, 2, 3, 4):
        first.metric("train", **fields("train", step=step, loss=math.nan if step == 2 else 8.0 / step, lr=0.5, samples_per_second=100.0))
    before = scalars(tmp_path)  # nothing was closed: a killed run leaves as much
    assert before["train/loss"] == [(1, 8.0), (3, pytest.approx(8 / 3)), (4, 2.0)]
    assert before["train/lr"] == [(step, 0.5) for step in (1, 2, 3, 4)]
    assert before["train/samples_per_second"] == [(step, 100.0) for step in (1, 2, 3, 4)]
    first.close()

    cut_back(tmp_path, 2)
    with RunLog(tmp_path, rank=0, resume_step=2) as second:
        second.metric("start", **fields("start"))
        second.metric("train", **fields("train", step=3, loss=0.25))
        second.metric("eval", **fields("eval", step=3, loss=0.5, top1=0.75, top5=None))
    after = scalars(tmp_path)
    assert after["train/loss"] == [(1, 8.0), (3, 0.25)]
    assert (after["eval/loss"], after["eval/top1"]) == ([(3, 0.5)], [(3, 0.75)])
    assert "eval/top5" not in after
