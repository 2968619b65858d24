"""Videos made into shards: what is one, of which format, and smaller where wished."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from photos import all_samples, make_folder, refused
from video_maker import encode, encode_sound, is_upright, number_of, numbered

from data.errors import DataError
from data.video import Video
from data.video_files import check_video, resize_video
from scripts.make_shards import main


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({}, "mp4"),
        ({"format": "mov"}, "mov"),
        ({"format": "matroska"}, "mkv"),
        ({"format": "webm", "codec": "libvpx-vp9", "options": {"cpu-used": "8"}}, "webm"),
        ({"format": "avi", "codec": "mpeg4"}, "avi"),
    ],
    ids=str,
)
def test_the_bytes_decide_the_field(how: dict, field: str) -> None:
    assert check_video(encode(5, **how)) == field


def test_what_is_none_is_refused() -> None:
    for data in (b"", b"junk", encode(5)[:-20], encode_sound()):
        with pytest.raises(DataError):
            check_video(data)


def test_small_videos_keep_their_bytes() -> None:
    data = encode(5, size=(64, 48))
    assert resize_video(data, 48) == ("mp4", data)


def test_resized_videos_show_the_same_at_the_same_times() -> None:
    ticks = [0, 30, 110, 140, 260, 290, 400, 470, 480, 560]
    upright = [np.ascontiguousarray(np.rot90(numbered(i, (192, 144)))) for i in range(10)]
    data = encode(10, ticks=ticks, time_base=Fraction(1, 1000), size=(144, 192), pictures=upright, rotation=270, audio=True)
    field, small = resize_video(data, 48)
    assert field == "mp4" and len(small) < len(data)
    with Video(small) as video:
        assert video.size == (64, 48) and video.rotation == 0
        assert np.allclose(video.times * 1000, ticks, atol=0.1)
        found = {index: picture.copy() for index, picture in video.read(range(10), video.size)}
    assert [number_of(picture) for picture in found.values()] == list(range(10)) and all(map(is_upright, found.values()))
    assert resize_video(data, 48)[1] == small  # the same bytes each time


def test_class_folders_become_shards_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes | int] = {f"{word}/{n}.mp4": encode(6 + n) for word in ("jump", "run") for n in range(3)}
    others: dict[str, bytes | int] = {"run/thumb.jpg": 1, "run/broken.mp4": encode(5)[:-9], "jump/sound.mkv": encode_sound("matroska")}
    make_folder(tmp_path / "clips", files | others)
    assert main([str(tmp_path / "clips"), str(tmp_path / "out"), "--num-shards", "2", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "6 videos of 2 classes in 2 shards" in out and "--task video-classification --model slowfast_8x8_r50" in out
    assert "left out: run/broken.mp4: the video is cut" in err and "left out: jump/sound.mkv: the file holds no video, only audio" in err
    assert "note: " in err and "1 files are not videos: run/thumb.jpg" in err
    found = all_samples(tmp_path / "out")
    assert sorted(found) == ["jump_0", "jump_1", "jump_2", "run_0", "run_1", "run_2"]
    assert found["run_2"]["mp4"] == files["run/2.mp4"] and found["run_2"]["cls"] == b"1"
    assert main([str(tmp_path / "clips"), str(tmp_path / "strict"), "--strict", "--workers", "1"]) == 2
    assert "(without --strict it would be left out)" in capsys.readouterr().err


def test_a_table_of_videos_and_resizing(tmp_path: Path) -> None:
    make_folder(tmp_path / "clips", {"a.mp4": encode(4, size=(96, 64)), "b.avi": encode(4, format="avi", codec="mpeg4", size=(96, 64))})
    (tmp_path / "clips" / "labels.csv").write_text("path,label\na.mp4,jump\nb.avi,run\n")
    assert main([str(tmp_path / "clips"), str(tmp_path / "out"), "--resize-video", "32", "--workers", "1"]) == 0
    found = all_samples(tmp_path / "out")
    assert {key: sorted(fields) for key, fields in found.items()} == {"jump_a": ["cls", "json", "mp4"], "run_b": ["cls", "json", "mp4"]}
    with Video(found["run_b"]["mp4"]) as video:
        assert video.size == (48, 32) and video.num_frames == 4


def test_kinetics_annotations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "clips", {"part/aaa.mp4": encode(4), "bbb_000010_000020.mp4": encode(5), "zzz.mp4": encode(6)})
    notes = '{"aaa": {"annotations": {"label": "playing guitar"}, "subset": "training"}, "ccc": {"annotations": {"label": "yoga"}},'
    (tmp_path / "k.json").write_text(notes + '"bbb": {"annotations": {"label": "yoga"}, "subset": "validate", "url": "https://x/bbb"}}')
    command = [str(tmp_path / "clips"), str(tmp_path / "out"), "--annotations", str(tmp_path / "k.json"), "--workers", "1"]
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "1 files are not videos" in err or "zzz.mp4" in err
    assert "1 annotated ids have no video here: ccc" in err
    assert all_samples(tmp_path / "out" / "train")["playing_guitar_aaa"]["cls"] == b"0"
    assert all_samples(tmp_path / "out" / "val")["yoga_bbb_000010_000020"]["cls"] == b"1"


def test_annotations_that_can_not_be_used_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "clips", {"aaa.mp4": encode(4)})
    notes = tmp_path / "k.json"
    for text, reason in (
        ("[]", "it must be an object of videos by their ids, as Kinetics has it"),
        ("{", "can't be read"),
        ('{"aaa": {}}', 'aaa has no {"annotations": {"label": "..."}}'),
        ('{"b": {"annotations": {"label": "x"}}}', "none of the 1 ids of"),
    ):
        notes.write_text(text)
        assert reason in refused(capsys, tmp_path / "clips", tmp_path / "out", "--annotations", notes)
    assert "--annotations goes with a folder" in refused(capsys, tmp_path / "clips" / "aaa.mp4", tmp_path / "out", "--annotations", notes)
