"""scripts/show_batch.py: what it computes is what the run's audit says, for every step and rank; without torch, audit or checkpoint."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from launching import base, launch, read_lines
from run_maker import write_run
from tar_maker import END, join_samples, make_samples, member, write_shard

from data.index import load_index
from scripts import show_batch

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def shards(tmp_path: Path) -> list[tuple[str, int]]:
    """Tars of two-field samples; the keys go on from shard to shard."""
    made = []
    for number, size in enumerate((7, 5, 1, 20)):
        path = write_shard(tmp_path / f"{number}.tar", size, start=100 * number)
        made.append((str(path), size))
    return made


def show(folder: Path, capsys: pytest.CaptureFixture[str], *argv: object) -> list[Row]:
    assert show_batch.main([str(folder), *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert not err
    header, *rows = (line.split("\t") for line in out.splitlines())
    assert header == "step rank slot position epoch shard index key offset valid".split()
    return [dict(zip(header, row, strict=True)) for row in rows]


def same_as_audit(folder: Path, capsys: pytest.CaptureFixture[str], keys: bool = True) -> int:
    """Compare every line of the training's audit; how many there are."""
    lines = 0
    for path in sorted((folder / "audit").glob("rank*.jsonl")):
        for line in read_lines(path):
            if line["split"] == "val":
                continue
            rows = show(folder, capsys, "--step", line["step"], "--rank", path.stem[4:])
            assert [int(row["epoch"]) for row in rows] == line["epoch"]
            assert [json.loads(row["valid"]) for row in rows] == line["valid"]
            ids = [[os.path.basename(row["shard"]), int(row["index"]), row["key"]] for row in rows]
            assert [i[: 3 if keys else 2] for i in ids] == [i[: 3 if keys else 2] for i in line["ids"]]
            lines += 1
    return lines


def test_a_real_run_of_lanes_whose_world_and_batch_sizes_changed(gloo_pool, picture_shards, tmp_path, capsys) -> None:
    paths = picture_shards([7, 5, 3, 1, 0, 41])
    more = ["--checkpoint-interval", 3, "--lanes", 4, "--shuffle-block", 8, "--seed", 7, "--epochs", 2]
    launch(gloo_pool, base(paths, tmp_path, "run", 3, *more, "-b", 10), crash_at=8)
    folder = tmp_path / "runs" / "run"
    assert same_as_audit(folder, capsys) == 3 * 8  # steps 7 and 8 were lost: they are 1..8 of the first start
    launch(gloo_pool, [*base(paths, tmp_path, "run", 2, *more, "-b", 7), "--resume", "auto"])
    assert same_as_audit(folder, capsys) == 3 * 6 + 2 * 8  # 60 of 114 samples, and 54 more
    shutil.rmtree(folder / "audit")
    shutil.rmtree(folder / "checkpoints")
    rows = show(folder, capsys, "--step", 14)
    assert sorted(int(row["position"]) for row in rows if row["valid"] == "true") == list(range(109, 114))
    for row in rows:
        with tarfile.open(row["shard"]) as tar:
            first = next(m for m in tar.getmembers() if m.name.startswith(row["key"] + "."))
            assert first.offset == int(row["offset"])


@pytest.mark.parametrize("with_step", [True, False])
@pytest.mark.parametrize("starts", [[(5, 3, None)], [(80, 7, None)], [(4, 4, 3), (9, 2, 2), (3, 1, 5), (10, 3, None)]])
def test_every_step_and_rank(starts, with_step, shards, tmp_path, capsys) -> None:
    streams: list[dict[str, Any]] = [{}, {"lanes": 3, "seed": 5}, {"no_shuffle": True}]
    for number, stream in enumerate(streams):
        folder = write_run(tmp_path / str(number), shards, starts, epochs=2, with_step=with_step, **stream)
        assert same_as_audit(folder, capsys, keys=False) > 0


def test_more_epochs_at_a_later_start(shards, tmp_path, capsys) -> None:
    folder = write_run(tmp_path / "run", shards, [(10, 3, None)], epochs=1)  # 33 samples: the 4th step is masked past them
    late = write_run(tmp_path / "late", shards, [(33, 1, 1), (10, 3, None)], epochs=2)  # as the second start goes on
    starts = [line for path in (folder, late) for line in read_lines(path / "metrics.jsonl") if line["event"] == "start"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (starts[0], {**starts[2], "step": 4})))
    (folder / "args.yaml").write_text((late / "args.yaml").read_text())
    assert same_as_audit(folder, capsys, keys=False) == 12
    first = [(row["position"], row["valid"]) for row in show(folder, capsys, "--step", 4, "--world-size", 1)]
    then = [(row["position"], row["valid"]) for row in show(folder, capsys, "--step", 5, "--world-size", 1)]
    assert first == [(str(p), "true" if p < 33 else "false") for p in range(30, 40)]
    assert then == [(str(p), "true") for p in range(33, 43)]


def test_flags_choose_slots(shards, tmp_path, capsys) -> None:
    folder = write_run(tmp_path / "run", shards, [(10, 3, None)], epochs=3, lanes=2)  # 33 samples an epoch
    whole = show(folder, capsys, "--step", 4)  # positions 30..39
    assert [row["rank"] for row in whole] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    assert show(folder, capsys, "--step", 4, "--rank", 1) == whole[4:8]
    counted = {(row["position"], row["shard"], row["index"], row["key"], row["offset"]) for row in whole if row["valid"] == "true"}
    assert len(counted) == 10
    for world_size in (1, 2, 7, 10):
        rows = show(folder, capsys, "--step", 4, "--world-size", world_size)
        assert len(rows) == world_size * -(-10 // world_size)
        assert {(r["position"], r["shard"], r["index"], r["key"], r["offset"]) for r in rows if r["valid"] == "true"} == counted
    assert show(folder, capsys, "--step", 4, "--epoch", 1) == [row for row in whole if int(row["position"]) >= 33]
    assert show(folder, capsys, "--epoch", 1) == show(folder, capsys, "--step", 4, "--epoch", 1)
    assert show(folder, capsys, "--epoch", 0) == show(folder, capsys, "--step", 1)
    assert {row["epoch"] for row in show(folder, capsys, "--step", 10, "--epoch", 3)} == {"3"}  # past the end: all masked


def test_steps_to_come_and_shards_by_other_names(tmp_path, capsys) -> None:
    folder = tmp_path / "a\tb"
    folder.mkdir()
    samples = join_samples(make_samples(3)) + member(b"new\tline\n.jpg") + member(b"caf\xe9.jpg") + member("x/./y.b.C")
    (folder / "s.tar.gz").write_bytes(gzip.compress(samples + END))
    path = str(folder / "s.tar.gz")
    made = write_run(tmp_path / "run", [(path.replace("\t", "\\t"), 6)], [(6, 1, 1)], status=None, no_shuffle=True)
    size = os.path.getsize(path)
    (made / "shards.tsv").write_text("path\tsamples\tbytes\n" + path.replace("\t", "\\t") + f"\t6\t{size}\n")
    rows = show(made, capsys, "--step", 3)  # only step 1 was taken
    assert [row["key"] for row in rows] == ["0000", "0001", "0002", "new\\tline\\n", "caf\\udce9", "x/./y"]
    assert [int(row["offset"]) for row in rows] == [0, 2048, 4096, 6144, 6656, 7168]
    assert {row["shard"] for row in rows} == {path.replace("\t", "\\t")}


def refused(argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    code: object
    try:
        code = show_batch.main([str(word) for word in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("show_batch.py: error: ")
    return err.removeprefix("show_batch.py: error: ").strip()


def test_mistakes_are_one_line(shards, tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", shards, [(10, 3, None)], epochs=3)
    assert refused([run], capsys) == "--step N or --epoch E is missing: which batch?"
    assert refused([run, "--step", 11], capsys) == "--step 11: this run has the steps 1..10"
    assert "argument --step: '0' is not a whole number of at least 1" in refused([run, "--step", 0], capsys)
    assert refused([run, "--epoch", 3], capsys) == "--epoch 3: this run has the epochs 0..2 (the first is 0)"
    assert refused([run, "--step", 1, "--epoch", 1], capsys) == "--epoch 1: no slot of step 1 is of it; leave --epoch out"
    assert refused([run, "--step", 1, "--rank", 3], capsys) == "--rank 3: step 1 has the ranks 0..2"
    assert "--world-size 11: the global batch of step 1 is 10" in refused([run, "--step", 1, "--world-size", 11], capsys)
    assert refused([tmp_path / "no", "--step", 1], capsys).startswith(f"{tmp_path}/no: no such folder; give a run folder")
    evaluated = write_run(tmp_path / "evaluated", [("x.tar", 1)], epochs=1)
    (evaluated / "shards.tsv").write_text("path\tsamples\tbytes\n")
    assert refused([evaluated, "--step", 1], capsys) == f"{evaluated}: this run has no training step; it only evaluated?"

    path = Path(shards[3][0])
    write_shard(path, 19)
    assert refused([run, "--step", 1], capsys).startswith(f"{path}: 19 samples in {path.stat().st_size} bytes, but the run saw 20 in ")
    path.unlink()
    assert refused([run, "--step", 1], capsys) == f"{path}: can't be read: No such file or directory"


def test_an_index_that_does_not_fit(shards, tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", shards, [(33, 1, None)], no_shuffle=True)
    path = Path(shards[3][0])
    load_index(str(path))
    data = bytearray(path.read_bytes())
    data[2048 * 2 + 148] ^= 1  # the checksum of the third sample's header; the index keeps its stamp
    times = os.stat(path)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    message = refused([run, "--step", 1], capsys)
    assert message == f"{path}: its index does not fit it: no sample at byte 4096; run scripts/index_shards.py --rebuild on it"


def test_starts_without_torch(shards, tmp_path) -> None:
    run = write_run(tmp_path / "run", shards, [(10, 3, None)])
    code = "import sys; from scripts import audit, show_batch; "
    code += f"show_batch.main([{str(run)!r}, '--step', '3']); audit.main([{str(run)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("exact\nFalse\n"), done.stderr
    code = "import data; from data import *; print(build_loader, Loader); data.xyzzy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "<function build_loader" in done.stdout
    assert done.stderr.endswith("AttributeError: module 'data' has no attribute 'xyzzy'\n")


def test_as_a_command(shards, tmp_path) -> None:
    run = write_run(tmp_path / "run", shards, [(10, 3, None)])
    command = [sys.executable, str(ROOT / "scripts" / "show_batch.py"), str(run)]
    done = subprocess.run([*command, "--step", "2", "--rank", "0"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 5, "")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "examples:\n  python scripts/show_batch.py runs/first --step 1234\n" in done.stdout
