"""scripts/audit.py, as a user calls it: exact runs pass, whole or under way, on any ranks; spoilt ones are in test_audit_spoilt.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import base, launch, spoil
from run_maker import change_lines, write_run

from scripts import audit

ROOT = Path(__file__).resolve().parents[1]
SHARDS = [(f"/data/{number}.tar", size) for number, size in enumerate((7, 5, 3, 1, 0, 41))]  # 57 samples
VAL = [("/data/val/0.tar", 9), ("/data/val/1.tar", 12)]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """3 epochs of 57 on 3 ranks, 10 a step: 18 steps, of which 6 and 12 straddle epochs and the last is half empty; evaluations of 21."""
    return write_run(tmp_path / "run", SHARDS, [(10, 3, None)], val=VAL)


def check(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = audit.main([str(folder), *more])
    out, err = capsys.readouterr()
    assert not err
    return code, out


def row(name: str, seen: int, distinct: int, repeated: int, missed: int, bad: int, masked: int, state: str = "57 samples") -> str:
    return f"{name} ({state}): {seen} seen, {distinct} distinct, {repeated} repeated, {missed} missed, {bad} bad, {masked} slots masked"


def test_an_exact_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(run_folder, capsys)
    lines = out.splitlines()
    assert (code, lines[-1]) == (0, "exact")
    assert lines[0] == f"{run_folder}: 57 samples in 6 shards, steps 1..18 on 3 ranks; masked slots: 54 padding, 36 past the end"
    masked = [int(line.split()[-3]) for line in lines[1:4]]
    assert sum(masked) <= 36  # a padded slot of 18 steps and 9 batches of evaluation; some stand for what is past the end
    assert lines[1:4] == [row(f"train epoch {epoch}", 57, 57, 0, 0, 0, masked[epoch]) for epoch in range(3)]
    assert lines[4:7] == [row(f"evaluation after step {step}", 21, 21, 0, 0, 0, 4, "21 samples") for step in (6, 12, 18)]


def test_bad_samples_are_bad_not_missed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder / "audit" / "rank1.jsonl"
    change_lines(path, lambda lines: lines[1]["valid"].__setitem__(0, False))
    shard, index, key = json.loads(path.read_text().splitlines()[1])["ids"][0]
    bad = {"step": 2, "rank": 1, "shard": shard, "index": index, "key": key, "field": "png", "reason": "cut"}
    others = [{**bad, "step": 3}, {**bad, "rank": 0}, {**bad, "index": 99}]
    (run_folder / "bad_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*others, bad]))
    code, out = check(run_folder, capsys)
    assert code == 0
    assert "train epoch 0 (57 samples): 57 seen, 57 distinct, 0 repeated, 0 missed, 1 bad" in out
    assert "54 padding, 36 past the end, 1 bad\n" in out
    (run_folder / "bad_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in others))
    code, out = check(run_folder, capsys)
    assert code == 1
    assert "train epoch 0 (57 samples): 56 seen, 56 distinct, 0 repeated, 1 missed, 0 bad" in out


def test_an_epoch_under_way_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", SHARDS, [(10, 2, 8)], status=None)
    code, out = check(folder, capsys)
    assert (code, out.splitlines()[-1]) == (0, "exact")
    assert row("train epoch 1", 23, 23, 0, 0, 0, 0, "open, 23 of 57 due") in out
    with open(folder / "audit" / "rank0.jsonl", "a") as file:  # rank 0 is at the next step, and rank 1 just writes of it
        file.write('{"step": 9, "epoch": [1, 1, 1, 1, 1], "ids": [' + ", ".join(['["0.tar", 0, ""]'] * 5))
        file.write('], "valid": [true, true, true, true, true], "split": "train"}\n')
    with open(folder / "audit" / "rank1.jsonl", "a") as file:
        file.write('{"step": 9, "epo')
    code, out = check(folder, capsys)
    assert code == 0
    assert row("train epoch 1", 23, 23, 0, 0, 0, 0, "open, 23 of 57 due") in out
    assert "not counted: step 9, train: some ranks are still at it, or were killed at it\n" in out
    # two steps apart is no race: a step needs every rank's gradients
    change_lines(folder / "audit" / "rank0.jsonl", lambda lines: lines.append({**lines[-1], "step": 10}))
    code, out = check(folder, capsys)
    assert code == 1
    assert "uneven: step 9: no line of rank 1" in out
    # a repeat and a miss show in an open epoch as well
    shutil.rmtree(folder)
    write_run(folder, SHARDS, [(10, 2, 8)], status="stopped")
    change_lines(folder / "audit" / "rank0.jsonl", lambda lines: lines[7]["ids"].__setitem__(0, lines[7]["ids"][1]))
    code, out = check(folder, capsys)
    assert code == 1
    assert row("train epoch 1", 23, 22, 1, 1, 0, 0, "open, 23 of 57 due") in out


def test_an_evaluation_under_way_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", SHARDS, [(10, 2, 6)], val=VAL, status=None)
    change_lines(folder / "metrics.jsonl", lambda lines: lines.pop())
    change_lines(folder / "audit" / "rank1.jsonl", lambda lines: lines.__delitem__(slice(-2, None)))  # ranks differ by two batches
    code, out = check(folder, capsys)
    assert code == 0
    assert row("evaluation after step 6", 10, 10, 0, 0, 0, 0, "open, 0 of 21 due") in out
    change_lines(folder / "metrics.jsonl", lambda lines: lines.append({"event": "end", "status": "finished", "steps": 6}))
    code, out = check(folder, capsys)
    assert code == 1
    assert "evaluation without result: evaluation after step 6" in out


@pytest.mark.parametrize("with_step", [True, False])
def test_other_world_sizes_and_batch_sizes_at_each_start(with_step: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = [(10, 3, 4), (7, 2, 3), (9, 4, 1), (60, 1, None)]
    folder = write_run(tmp_path / "run", SHARDS, starts, with_step=with_step, lanes=3, val=VAL)
    code, out = check(folder, capsys)
    assert (code, out.splitlines()[-1]) == (0, "exact")
    assert "steps 1..10 on 3, then 2, then 4, then 1 ranks" in out
    change_lines(folder / "audit" / "rank2.jsonl", lambda lines: lines.pop(3))  # the last step of the three
    code, out = check(folder, capsys)
    assert code == 1
    assert "uneven: step 4: no line of rank 2" in out


def test_a_global_batch_of_several_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [("/a/0.tar", 4), ("/a/1.tar", 3)], [(16, 3, None)], epochs=7)
    assert check(folder, capsys)[0] == 0
    change_lines(folder / "audit" / "rank1.jsonl", lambda lines: lines[0]["epoch"].__setitem__(0, 6))
    code, out = check(folder, capsys)
    assert code == 1
    assert "train epoch 0 (7 samples): 6 seen, 6 distinct, 0 repeated, 1 missed" in out
    assert "train epoch 6 (7 samples): 8 seen, 7 distinct, 1 repeated, 0 missed" in out
    assert "missed: train epoch 0: 1 samples\n" in out and "repeated: train epoch 6: 1 samples\n" in out


def test_shards_of_one_name_in_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = [("/a/0.tar", 4), ("/b/0.tar", 30), ("/c/0.tar", 9), ("/a/1.tar", 3)]
    folder = write_run(tmp_path / "run", shards, [(8, 2, None)])
    code, out = check(folder, capsys)
    assert code == 0
    assert "note: several shards have one file name (0.tar); their samples are told apart by index only\n" in out
    assert row("train epoch 0", 46, 46, 0, 0, 0, 0, "46 samples") in out
    change_lines(folder / "audit" / "rank1.jsonl", lambda lines: lines.insert(0, lines[0]))
    code, out = check(folder, capsys)
    assert code == 1
    assert row("train epoch 0", 50, 46, 4, 0, 0, 0, "46 samples") in out
    change_lines(folder / "audit" / "rank1.jsonl", lambda lines: lines.__delitem__(slice(2)))
    assert row("train epoch 0", 42, 42, 0, 4, 0, 0, "46 samples") in check(folder, capsys)[1]


def test_batches_are_the_same_text_for_every_world_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for world_size in 1, 2, 3:
        folder = write_run(tmp_path / str(world_size), SHARDS, [(10, world_size, None)], val=VAL, lanes=3)
        code, out = check_batches(folder, capsys)
        assert code == 0
        texts.append(out)
    assert texts[0] == texts[1] == texts[2]
    lines = [json.loads(line) for line in texts[0].splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 19))
    assert [len(line["samples"]) for line in train] == [10] * 17 + [1]
    assert all(line["samples"] == sorted(line["samples"]) and len(line["samples"][0]) == 4 for line in lines)
    assert [(line["step"], len(line["samples"])) for line in lines if line["split"] == "val"][:4] == [(6, 10), (6, 10), (6, 1), (12, 10)]
    other = write_run(tmp_path / "other", SHARDS, [(10, 2, None)], val=VAL, lanes=3, seed=1)
    assert check_batches(other, capsys)[1] != texts[0]


def check_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = audit.main(["--batches", str(folder)])
    out, err = capsys.readouterr()
    assert err == "exact\n"
    return code, out


def test_a_real_run_broken_off_and_resumed_on_other_processes(gloo_pool, picture_shards, tmp_path, capsys) -> None:
    paths, val = picture_shards([7, 5, 3, 1, 0, 41]), picture_shards([9, 12], name="val")
    spoil(paths[5], b"s00050.png")
    spoil(val[0], b"s00003.png")
    more = ["--val-data", *val, "--checkpoint-interval", 3, "--lanes", 2]
    launch(gloo_pool, base(paths, tmp_path, "run", 3, *more, "-b", 10), crash_at=8)
    folder = tmp_path / "runs" / "run"
    code, out = check(folder, capsys)
    assert code == 0  # what the killed run left is exact as well
    assert "train epoch 1 (open, 23 of 57 due): 23 seen, 23 distinct, 0 repeated, 0 missed" in out
    launch(gloo_pool, [*base(paths, tmp_path, "run", 2, *more, "-b", 7), "--resume", "auto"])
    code, out = check(folder, capsys)
    assert (code, out.splitlines()[-1]) == (0, "exact")
    for epoch in range(3):
        assert f"train epoch {epoch} (57 samples): 57 seen, 57 distinct, 0 repeated, 0 missed, 1 bad" in out
    assert out.count("(21 samples): 21 seen, 21 distinct, 0 repeated, 0 missed, 1 bad") == 3
    assert "on 3, then 2 ranks" in out
    argv = ["--evaluate", "--val-data", *val, "--resume", folder, "--device", "cpu", "-b", 8, "--nproc-per-node", 2, "-j", 0, "--audit",
            "--output", tmp_path / "runs", "--name", "evaluated"]  # fmt: skip
    launch(gloo_pool, argv)
    code, out = check(tmp_path / "runs" / "evaluated", capsys)
    assert code == 0
    assert "no training step on 2 ranks" in out and "(21 samples): 21 seen, 21 distinct, 0 repeated, 0 missed, 1 bad" in out


def test_bad_input_is_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path = run_folder) -> str:
        assert audit.main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("audit.py: error: ") and err.count("\n") == 1
        return err

    assert "nowhere: no such folder; give a run folder, for example runs/nowhere" in refused(run_folder / "nowhere")
    assert "args.yaml: can't be read (No such file or directory): is " in refused(run_folder / "audit")
    path = run_folder / "audit" / "rank1.jsonl"
    good = path.read_text()
    for line, message in [
        ("nonsense\n", "rank1.jsonl:1: not a JSON object: b'nonsense"),
        ('{"step": 1}\n', "rank1.jsonl:1: not a line of an audit: it needs step, epoch, ids, valid and split"),
        ('{"step": 1, "epoch": [0], "ids": [["a"]], "valid": [true], "split": "train"}\n', "step 1: not [shard, index, key]"),
        ('{"step": 1, "epoch": [0], "ids": [["a", "b", "c"]], "valid": [true], "split": "train"}\n', "step 1: not [shard, index, key]"),
    ]:
        path.write_text(line + good)
        assert message in refused()
    (run_folder / "bad_samples.jsonl").write_text('{"step": 1}\n')
    assert "bad_samples.jsonl:1: no bad sample ('rank')" in refused()
    for path in (run_folder / "audit").iterdir():
        path.write_text("")
    (run_folder / "bad_samples.jsonl").unlink()
    assert "audit: no line yet: this run has not finished a step" in refused()
    shutil.rmtree(run_folder / "audit")
    assert "audit: no rank0.jsonl: there is an audit only of a run started with --audit" in refused()


def test_as_a_command(run_folder: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "audit.py")]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=run_folder)
    assert done.returncode == 0 and "examples:\n  python scripts/audit.py runs/first\n" in done.stdout
    done = subprocess.run([*command, "--batchs", "x"], capture_output=True, text=True, cwd=run_folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "audit.py: error: " in done.stderr
