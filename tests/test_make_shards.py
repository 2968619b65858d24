"""make_shards from end to end: what is written, what a kill leaves, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from photos import all_samples, content, make_folder, paths, picture, refused, run, some_classes, summary

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", some_classes())


# --- what is written


def test_samples_classes_and_summary(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(folder, out, "--shard-size", "4") == 0
    found = all_samples(out)
    assert Counter(key[:4] for key in found) == {"ant_": 5, "bee_": 5}
    for fields in found.values():
        path = json.loads(fields["json"])["path"]
        assert fields["jpg"] == (folder / path).read_bytes()  # untouched
        assert fields["cls"] == (b"0" if path.startswith("ant/") else b"1")
        assert json.loads(fields["json"])["class"] == path[:3]
    assert paths(out) != sorted(paths(out))
    described = summary(out)
    assert described["classes"] == ["ant", "bee"]
    assert described["fields"] == ["cls", "jpg", "json"]
    assert [s["samples"] for s in described["splits"]["all"]["shards"]] == [4, 4, 2]
    assert described["splits"]["all"]["samples"] == 10
    assert described["arguments"]["source"] == "photos"
    assert str(tmp_path) not in json.dumps(described)
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["dataset.json", *(f"00{i}.tar{end}" for i in range(3) for end in ("", ".idx"))]
    )
    assert f"--data '{out}/{{000..002}}.tar'" in capsys.readouterr().out


def test_digits_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--no-shuffle") == 0
    described = summary(tmp_path / "shards")
    assert len(described["splits"]["all"]["shards"]) == 100
    assert described["splits"]["all"]["samples"] == 1797
    assert described["classes"] == list("0123456789")
    output = capsys.readouterr().out
    assert "shards: 1,797 pictures of 10 classes in 100 shards" in output
    assert "--data 'shards/{000..099}.tar'" in output


def test_loads_here(folder: Path, tmp_path: Path) -> None:
    from data.classes import resolve_labels
    from data.shards import load_shards

    run(folder, tmp_path / "out", "--shard-size", "4")
    shards = load_shards(f"{tmp_path}/out/{{000..002}}.tar", progress=False)
    assert [shard.num_samples for shard in shards] == [4, 4, 2]
    assert resolve_labels(shards, "cls").names == ("ant", "bee")


def test_loads_in_webdataset(folder: Path, tmp_path: Path) -> None:
    import webdataset as wds

    run(folder, tmp_path / "out", "--shard-size", "4")
    dataset = wds.WebDataset(f"{tmp_path}/out/{{000..002}}.tar", shardshuffle=False).decode("pil")
    found = [(s["__key__"], s["cls"], s["json"]["class"], s["jpg"].size) for s in dataset]
    assert [key for key, *_ in found] == list(all_samples(tmp_path / "out"))
    assert {tuple(rest) for _, *rest in found} == {(0, "ant", (8, 6)), (1, "bee", (8, 6))}


def test_loads_in_hf_datasets(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    run(folder, tmp_path / "out", "--shard-size", "4")
    files = sorted(map(str, (tmp_path / "out").glob("*.tar")))
    dataset = datasets.load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)
    found = [(s["__key__"], s["cls"], s["json"]["class"], s["jpg"].size) for s in dataset]
    assert [key for key, *_ in found] == list(all_samples(tmp_path / "out"))
    assert {tuple(rest) for _, *rest in found} == {(0, "ant", (8, 6)), (1, "bee", (8, 6))}


# --- the same bytes


def test_bytes_depend_on_the_pictures_alone(tmp_path: Path) -> None:
    """Not on workers, the order of making files, their times, nor on folder, zip or tar."""
    files = some_classes(20)
    make_folder(tmp_path / "one" / "photos", files)
    make_folder(tmp_path / "two" / "photos", dict(reversed(files.items())))
    for path in (tmp_path / "two").rglob("*.jpg"):
        os.utime(path, (1, 1))
    with zipfile.ZipFile(tmp_path / "photos", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files, reverse=True):
            archive.write(tmp_path / "one/photos" / name, f"wrapped/{name}")
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.add(tmp_path / "one/photos", "./a/b")
    os.makedirs(tmp_path / "3")
    os.rename(tmp_path / "tar", tmp_path / "3/photos")
    sources = [tmp_path / "one/photos", tmp_path / "two/photos", tmp_path / "photos", tmp_path / "3/photos"]
    for number, source in enumerate(sources):
        workers = "2" if number == 1 else "1"
        assert run(source, tmp_path / f"out{number}", "--shard-size", "7", "--workers", workers) == 0
    first = content(tmp_path / "out0")
    assert len(first) == 13
    assert all(content(tmp_path / f"out{number}") == first for number in (1, 2, 3))


def test_order_is_drawn_from_the_seed(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "a", "--seed", "1")
    run(folder, tmp_path / "b", "--seed", "2")
    run(folder, tmp_path / "c", "--no-shuffle")
    assert paths(tmp_path / "a") != paths(tmp_path / "b")
    assert paths(tmp_path / "c") == sorted(paths(tmp_path / "a")) == sorted(paths(tmp_path / "b"))


def test_order_is_pinned(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out")
    assert [path.replace(".jpg", "") for path in paths(tmp_path / "out")] == PINNED


PINNED = "bee/4 ant/1 ant/3 ant/4 bee/1 bee/2 bee/0 bee/3 ant/0 ant/2".split()


# --- killed and started again


def start_and_kill(command: list[str], out: Path, num_shards: int) -> None:
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while len(list(out.glob("*.tar"))) < num_shards:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while sys.platform == "linux" and any(_is_running(command, p) for p in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < end, "a worker outlives its parent"
        time.sleep(0.01)


def _is_running(command: list[str], process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes() == "\0".join([*command, ""]).encode()
    except OSError:  # gone
        return False


def test_killed_run_goes_on(tmp_path: Path) -> None:
    files = some_classes(150)
    files["ant/broken.jpg"] = b"no picture"
    source, out = make_folder(tmp_path / "photos", files), tmp_path / "out"
    options = ["--num-shards", "150", "--workers", "2"]
    start_and_kill([sys.executable, "scripts/make_shards.py", str(source), str(out), *options], out, 20)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("*.tar")}
    assert 20 <= len(before) < 150
    assert not (out / "dataset.json").exists()
    assert run(source, out, *options) == 0
    assert {name: ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) for name in before} == before
    assert run(source, tmp_path / "unbroken", *options) == 0
    assert content(out) == content(tmp_path / "unbroken")
    assert [item["name"] for item in summary(out)["left_out"]] == ["ant/broken.jpg"]


def test_killed_worker(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "data.making.check_picture", lambda data: os.kill(os.getpid(), signal.SIGKILL)
    )  # workers are forks
    error = refused(capsys, folder, tmp_path / "out", "--shard-size", "3", "--workers", "2")
    assert error.startswith("a worker process was killed (out of memory?): run the same command again")


def test_only_what_is_missing_is_written_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(folder, out, "--shard-size", "3")
    before, stamps = content(out), {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    capsys.readouterr()
    assert run(folder, out, "--shard-size", "3") == 0
    assert "4 of 4 shards are there already" in capsys.readouterr().err
    (out / "001.tar").unlink()
    (out / "002.tar.idx").unlink()
    (out / "003.tar").write_bytes(b"cut")
    (out / ".001.tar.1234.part").write_bytes(b"of a killed run")
    assert run(folder, out, "--shard-size", "3") == 0
    assert content(out) == before
    assert (out / "000.tar").stat().st_mtime_ns == stamps["000.tar"]


def test_journal_that_a_crash_cut(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(folder, tmp_path / "unbroken", "--shard-size", "3")
    run(folder, out, "--shard-size", "3", "--strict")
    described = summary(out)
    header = json.dumps({"digest": described["digest"], "arguments": described["arguments"]})
    (out / "dataset.json").unlink()
    (out / "dataset.json.part").write_text(header + '\n{"shard": "000.tar", "samp')
    assert run(folder, out, "--shard-size", "3") == 0
    assert content(out) == content(tmp_path / "unbroken")


def test_changed_pictures_or_arguments_are_not_mixed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(folder, out, "--shard-size", "3")
    described = summary(out)
    header = json.dumps({"digest": described["digest"], "arguments": described["arguments"]})
    for unfinished in (False, True):
        if unfinished:
            (out / "dataset.json").rename(tmp_path / "dataset.json")
            (out / "dataset.json.part").write_text(header + "\n")
        before = content(out)
        capsys.readouterr()
        way_out = "choose another folder, or give --overwrite to replace them"
        error = refused(capsys, folder, out, "--shard-size", "4")
        assert error == f"{out}: holds shards made differently (shard_size 3, now 4): {way_out}"
        (folder / "ant/more.jpg").write_bytes(picture())
        error = refused(capsys, folder, out, "--shard-size", "3")
        assert error == (
            f"{out}: holds shards made differently (the pictures, their labels or the classes are not the same): {way_out}"
        )
        (folder / "ant/more.jpg").unlink()
        assert content(out) == before
    assert run(folder, out, "--shard-size", "4", "--overwrite") == 0
    run(folder, tmp_path / "fresh", "--shard-size", "4")
    assert content(out) == content(tmp_path / "fresh")


# --- real pictures


def test_real_sources(shared_data: Path, tmp_path: Path) -> None:
    assert run(shared_data / "cifar10/cifar10_test_3000.tar", tmp_path / "cifar", "--num-shards", "3") == 0
    described = summary(tmp_path / "cifar")
    assert described["splits"]["all"]["samples"] == 3000 and not described["left_out"]
    assert len(described["classes"]) == 10
    assert run(shared_data / "imagenet", tmp_path / "imagenet", "--columns", "file,name") == 0
    assert summary(tmp_path / "imagenet")["splits"]["all"]["samples"] == 150
    assert run(shared_data / "ants_bees", tmp_path / "ants_bees", "--resize", "64") == 0
    splits = summary(tmp_path / "ants_bees")["splits"]
    assert {name: split["samples"] for name, split in splits.items()} == {"train": 50, "val": 16}
