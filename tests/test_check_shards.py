"""scripts/check_shards.py on shards broken in each way: what it says, what it writes, how it exits."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tar_maker as tm
from PIL import Image

from data.index import load_index
from data.shards import load_shards
from data.writer import ShardWriter, write_dataset_json
from scripts import check_shards

ROOT = Path(__file__).resolve().parents[1]


def png(seed: int, side: int = 16) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def sample(i: int, **fields: bytes) -> tuple[str, dict[str, bytes]]:
    return f"s{i:03d}", {"png": png(i), "cls": b"%d" % (i % 3), **fields}


def write(path: Path, *samples: tuple[str, dict[str, bytes]]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(tm.join_samples(samples) + tm.END)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write(tmp_path / "set" / f"{number:03d}.tar", *(sample(10 * number + i) for i in range(10)))
    return tmp_path / "set"


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """check(words...) -> (exit status, what was printed); nothing on stderr unless it is refused."""

    def call(*argv: object) -> tuple[int, str]:
        try:
            code = check_shards.main([str(word) for word in argv])
        except SystemExit as stopped:  # argparse
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        err = "".join(part for part in err.split("\r") if "shards:" not in part).strip(" ")  # a bar, on a slow machine
        if code == 2:
            assert out == "" and err.count("\n") == 1 and err.startswith("check_shards.py: error: ")
            return code, err
        assert err == ""
        return code, out

    return call


def problems(out: str) -> list[str]:
    """The lines under `problems:`."""
    lines = out.splitlines()
    if "problems:" not in lines:
        return []
    after = lines[lines.index("problems:") + 1 :]
    return [line.strip() for line in after[: next(i for i, line in enumerate(after) if not line.startswith("  "))]]


def notes(out: str) -> str:
    return out.partition("notes:\n")[2]


def test_good_shards(folder: Path, check: Check) -> None:
    before = sorted(os.listdir(folder))
    code, out = check(folder, "--decode", "-j", 2)
    assert code == 0
    assert out.splitlines()[:2] == ["shard    samples      size  bad  index   verdict", "000.tar       10  26.0 KiB    0  absent  ok"]
    assert "30 samples in 3 shards" in out and "3 classes, 10 to 10 samples each" in out
    assert "pictures: PNG RGB 30\nsizes: 16x16 30\n" in out
    assert out.endswith("no problem found\n")
    assert sorted(os.listdir(folder)) == before  # nothing is written beside the shards


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b"<html>" * 300), "unusable: {}: a web page, not a tar: its download failed; download it again"),
        (lambda path: path.write_bytes(b""), "unusable: {}: empty (0 bytes): no tar in it; download or make it again"),
        (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(600)), "unusable: {}: compressed with zstd, which has no random access"),
        (lambda path: os.truncate(path, 12_000), "damaged: {}: "),
        (lambda path: flip(path, 10240 + 148), "damaged: {}: broken header at byte 10240"),
    ],
)
def test_a_shard_that_is_broken(folder: Path, check: Check, spoil: Callable[[Path], Any], said: str) -> None:
    path = folder / "001.tar"
    spoil(path)
    code, out = check(folder)
    assert code == 1 and len(problems(out)) == 1, out
    assert problems(out)[0].startswith(said.format(path))
    assert out.endswith("1 problem found\n") and "000.tar       10" in out


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_index_that_does_not_fit(folder: Path, check: Check) -> None:
    load_shards(str(folder))
    assert check(folder)[0] == 0
    stamp = os.stat(folder / "001.tar").st_mtime_ns
    write(folder / "001.tar", *(sample(i, json=b"{}") for i in range(10, 20)))
    os.utime(folder / "001.tar", ns=(stamp, stamp))  # so that load_shards would believe it
    code, out = check(folder)
    assert code == 1 and problems(out)[0].startswith(f"stale index: {folder}/001.tar: its .idx does not fit it")
    (folder / "002.tar.idx").write_bytes(b"123")
    assert "stale index" in problems(check(folder)[1])[1]


def listed(folder: Path, sizes: Sequence[int]) -> Path:
    """Shards with a dataset.json, as make_shards leaves them."""
    folder.mkdir()
    records, serial = [], 0
    for number, size in enumerate(sizes):
        with ShardWriter(folder / f"{number:03d}.tar") as writer:
            for _ in range(size):
                writer.add(*sample(serial))
                serial += 1
        assert writer.record is not None
        records.append(writer.record)
    write_dataset_json(folder / "dataset.json", {"all": records}, ["a", "b", "c"], {})
    return folder


def test_sha256_against_dataset_json(tmp_path: Path, check: Check) -> None:
    folder = listed(tmp_path / "set", [5, 5, 5])
    code, out = check(folder)
    assert code == 0 and "3 of the shards have the sha256 that dataset.json gives" in out
    flip(folder / "001.tar", 700)  # inside the first picture: its checksum is wrong, too, when it is decoded
    (folder / "002.tar").unlink()
    code, out = check(folder)
    first, *rest = problems(out)
    assert code == 1 and first.startswith(f"changed: {folder}/001.tar: sha256 ") and "of dataset.json: it was changed" in first
    assert rest[-1] == f"missing shard: {folder}/002.tar: dataset.json lists it, but it is not there"
    assert "1 of the shards have the sha256" in out


def test_bad_samples_are_named(tmp_path: Path, check: Check) -> None:
    cut = png(5)[:-20]
    wrong_pixels = bytearray(png(6))
    wrong_pixels[60] ^= 0xFF
    folder = tmp_path / "set"
    bad = {2: {"png": cut}, 3: {"png": b""}, 4: {"png": bytes(wrong_pixels)}, 5: {"cls": b"\xff\xfe"}, 6: {"png": b"hello"}}
    write(folder / "0.tar", *(sample(i, **bad.get(i, {})) for i in range(60)))
    report = tmp_path / "report.json"
    code, out = check(folder, "--json", report, "--decode")
    assert code == 1
    assert "5 bad samples, the first is 0.tar sample 2 (s002): png: PNG is cut" in problems(out)[0]
    content = json.loads(report.read_text())["shards"]
    assert content["ok"] is False and content["bad_samples"] == 5 and content["samples"] == 60
    reasons = {one["index"]: (one["field"], one["reason"]) for one in content["shards"][0]["bad"]}
    assert reasons.keys() == {2, 3, 4, 5, 6}
    assert reasons[3] == ("png", "the file is empty") and "fails its checksum" in reasons[4][1]
    assert reasons[5][0] == "cls" and reasons[6][1].startswith("not a picture: 5 bytes")


def test_only_decoding_finds_some_of_them(tmp_path: Path, check: Check) -> None:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(out, "WEBP")
    data = bytearray(out.getvalue())
    data[200:] = bytes(len(data) - 200)
    write(tmp_path / "0.tar", ("a", {"webp": bytes(data)}), ("b", {"webp": out.getvalue(), "json": b"{no"}))
    assert "bad samples" not in check(tmp_path / "0.tar")[1]
    code, said = check(tmp_path / "0.tar", "--decode")
    assert code == 1 and "bad sample" in problems(said)[0]
    assert ("2 bad samples" in said) or "0.tar sample 1 (b): json: not JSON" in said


def test_labels(folder: Path, tmp_path: Path, check: Check) -> None:
    classes = tmp_path / "classes.txt"
    classes.write_text("ant\nbee\n")
    code, out = check(folder, "--classes", classes)
    assert code == 1 and "label 2 is outside the classes 0..1" in problems(out)[0]
    assert "ant  10  ####" in out
    code, out = check(folder, "--label", "json:a.b")
    assert code == 1 and "10 bad samples, the first is 000.tar sample 0 (s000): json: no label" in problems(out)[0]
    classes.write_text("ant\nbee\nfly\nwasp\n")
    code, out = check(folder, "--classes", classes)
    assert code == 0 and "1 of the 4 classes have no sample" in notes(out)
    write(folder / "003.tar", *((f"x{i}", {"png": png(i), "cls": b"0"}) for i in range(100, 300)))
    assert "imbalance: class 0 has 210 samples, class 2 has 10 (21 times fewer)" in notes(check(folder)[1])


def test_missing_fields(tmp_path: Path, check: Check) -> None:
    samples = [sample(i) for i in range(100)]
    samples[40] = ("s040", {"cls": b"1"})
    samples[70] = ("s070", {"png": png(70), "json": b"{}"})
    samples[80] = ("s080", {"jpg": png(80), "cls": b"1"})  # a picture all the same
    write(tmp_path / "0.tar", *samples)
    code, out = check(tmp_path / "0.tar")
    assert code == 1 and sorted(problems(out)) == [
        "missing field: 1 of 100 samples lacks a picture: the first is 0.tar sample 40 (s040), which has cls",
        "missing field: 1 of 100 samples lacks cls: the first is 0.tar sample 70 (s070), which has json, png",
    ]


def test_repeated_keys(tmp_path: Path, check: Check) -> None:
    folder = tmp_path / "set"
    first = [sample(i) for i in range(20)]
    first[10] = ("s003", first[10][1])  # far away in one shard
    write(folder / "0.tar", *first)
    write(folder / "1.tar", ("s005", sample(50)[1]), *(sample(i) for i in range(30, 40)))  # across shards
    near = tm.join_samples([sample(60)]) + tm.join_samples([("s060", sample(61)[1])])
    (folder / "2.tar").write_bytes(near + tm.join_samples([sample(62)]) + tm.END)  # beside each other: one sample to any reader
    (folder / "3.tar").write_bytes(tm.join_samples([sample(70)]) + tm.END + tm.join_samples([sample(70)]) + tm.END)  # joined archives
    code, out = check(folder)
    assert code == 1
    found = {line.partition(":")[0]: line for line in problems(out)}
    assert found.keys() == {"bad samples", "repeated key"}
    assert "2.tar sample 0 (s060): png: the sample has this field twice (two samples with one key" in found["bad samples"]
    assert found["repeated key"].startswith("repeated key: 3 keys are there more than once (2 within a shard, 1 across shards): ")
    assert "0.tar sample 3 (s003) = 0.tar sample 10 (s003); 0.tar sample 5 (s005) = 1.tar sample 0 (s005)" in found["repeated key"]
    assert "3.tar sample 0 (s070) = 3.tar sample 1 (s070)" in found["repeated key"]


def test_copies_and_overlap(folder: Path, tmp_path: Path, check: Check) -> None:
    val = write(tmp_path / "val" / "0.tar", ("other", sample(7)[1]), sample(100), ("s001", sample(101)[1]))
    code, out = check(folder, "--val", val)
    assert code == 1
    pair = "0.tar sample 0 (other) = 000.tar sample 7 (s007)"
    assert problems(out) == [f"overlap: 1 of its 3 samples has the content of a training sample: {pair}"]
    assert "1 of its 3 samples has the key of a training sample: 0.tar sample 2 (s001) = 000.tar sample 1 (s001)" in notes(out)
    assert "== training set ==" in out and "== validation set ==" in out
    assert check(folder, "--val", write(tmp_path / "val" / "1.tar", sample(200)))[0] == 0
    write(folder / "003.tar", ("copy", sample(7)[1]))
    code, out = check(folder)
    assert code == 0 and "1 sample is a copy of another, by content: 000.tar sample 7 (s007) = 003.tar sample 0 (copy)" in notes(out)


def test_fix_writes_clean_shards(tmp_path: Path, check: Check) -> None:
    folder = tmp_path / "set"
    first = [sample(i) for i in range(60)]
    first[10] = ("s003", first[10][1])
    first[11] = ("s004", first[4][1])
    first[20] = ("s020", {"png": png(20)[:-9], "cls": b"1"})
    first[30] = ("s030", {"cls": b"1"})
    write(folder / "0.tar", *first)
    write(folder / "1.tar", *(sample(i) for i in range(70, 80)))
    os.truncate(folder / "1.tar", 9 * 2560 - 100)
    write(folder / "2.tar", ("only", {"png": b"bad", "cls": b"0"}))
    (folder / "3.tar").write_bytes(b"<html>")
    out_folder = tmp_path / "clean"
    code, out = check(folder, "--decode", "--fix", out_folder)
    assert code == 1
    whole = load_index(str(folder / "1.tar")).num_samples
    assert 5 <= whole < 10
    assert f"wrote {57 + whole} samples into 2 clean shards in {out_folder}; 3 samples left out" in out
    assert "1 sample had the key of an earlier one and got another: s003 is s003-again2" in out
    code, again = check(out_folder, "--decode")
    assert code == 0 and "2 of the shards have the sha256" in again, again
    content = json.loads((out_folder / "dataset.json").read_text())
    assert {one["name"] for one in content["left_out"]} == {"s004", "s020", "s030"}
    assert load_shards(str(out_folder))[0].num_samples == 57
    assert check(folder, "--fix", out_folder)[1].strip().endswith("is not empty: give a new folder for the clean shards")


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, check: Check) -> None:
    assert "there is no folder" in check(tmp_path / "no" / "{0..3}.tar")[1]
    refused = check("http://u:secret@127.0.0.1:9/{0..3}.tar?secret")[1]
    assert "http://127.0.0.1:9/0.tar: every byte is read here, and that of local files only: copy the shards to a local disk" in refused
    assert "secret" not in refused
    assert "label source 'x'" in check(folder, "--label", "x")[1]
    assert "can't be read" in check(folder, "--classes", tmp_path / "none.txt")[1]
    assert "No such file or directory" in check(folder, "--json", tmp_path / "no" / "x.json")[1]
    assert "is a file" in check(folder, "--fix", folder / "000.tar")[1]


def test_names_are_escaped(tmp_path: Path, check: Check) -> None:
    write(tmp_path / "0.tar", ("a\x1b[31m", {"png": b"x\x1b[0m"}), ("b", {"evil\x1b[2J": b"1"}))
    assert "\x1b" not in check(tmp_path / "0.tar")[1]


def test_foreign_shards(shared_data: Path, check: Check, tmp_path: Path) -> None:
    """Tars of other tools hold what their ANSWERS.json says."""
    answers = json.loads((shared_data / "foreign_shards" / "ANSWERS.json").read_text())
    for name, answer in answers.items():
        report = tmp_path / f"{name}.json"
        assert check(shared_data / "foreign_shards" / name, "--decode", "--json", report)[0] == 0
        content = json.loads(report.read_text())["shards"]
        assert content["samples"] == answer["samples"], name
        if "cls_histogram" in answer:
            assert content["classes"] == answer["cls_histogram"]


def test_clips_are_decoded(shared_data: Path, check: Check, tmp_path: Path) -> None:
    path = min(path for path in (shared_data / "video" / "named_actions").rglob("*") if path.is_file())
    clip, kind = path.read_bytes(), path.suffix[1:]
    write(tmp_path / "0.tar", ("good", {kind: clip}), ("cut", {kind: clip[:200]}), ("wrong", {kind: b"hello" * 99}))
    assert "bad samples" not in check(tmp_path)[1]
    code, out = check(tmp_path, "--decode")
    assert code == 1 and "2 bad samples, the first is 0.tar sample 1 (cut)" in problems(out)[0] and " video 1" in out


def test_as_a_command(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_shards.py")]
    done = subprocess.run([*command, "set/{000..002}.tar"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("no problem found\n")
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "examples:\n  python scripts/check_shards.py 'shards/{000..099}.tar'\n" in done.stdout
    code = f"import sys; from scripts import check_shards; check_shards.main([{str(folder)!r}, '--decode']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("False\n"), done.stderr
