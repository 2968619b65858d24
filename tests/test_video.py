"""Frames of videos: the right ones, upright, in the right colours, whatever the container, codec and clock; bad files are data errors."""

from __future__ import annotations

import io
import json
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_maker import encode, encode_sound, is_upright, number_of, numbered

from data.errors import DataError
from data.stills import short_side
from data.video import MAX_FRAME_PIXELS, Video

MPEG4_WITH_B = {"format": "avi", "codec": "mpeg4", "options": {"bf": "2"}}
UNEVEN = [0, 20, 100, 110, 200, 290, 300, 340, 420, 500, 505, 600, 660, 700, 790, 800, 880, 900, 990, 1000]
SPARSE = {"time_base": Fraction(1, 1000)}


def read(data: bytes, indexes: Any = None) -> dict[int, int]:
    """Index -> the number that the frame shows; all must be upright."""
    with Video(memoryview(data)) as video:
        found = {}
        for index, picture in video.read(range(video.num_frames) if indexes is None else indexes, video.size):
            assert picture.dtype == np.uint8 and picture.shape == (video.size[1], video.size[0], 3) and is_upright(picture)
            found[index] = number_of(picture)
    return found


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"format": "matroska"},
        {"format": "mov"},
        {"format": "webm", "codec": "libvpx-vp9", "options": {"cpu-used": "8"}},
        {"format": "avi", "codec": "mpeg4"},
        MPEG4_WITH_B,
        {"format": "avi", "codec": "mjpeg", "pixels": "yuvj420p"},
        {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
        {"pixels": "yuv420p10le"},
        {"codec": "libx265", "pixels": "yuv420p10le", "options": {"x265-params": "log-level=none"}},
        {"size": (67, 51), "pixels": "yuv444p"},
        {"gop": 1},
        {"gop": 250},
        {"audio": True},
        {"audio": True, "format": "matroska"},
        {"options": {"x264-params": "open-gop=1:scenecut=0:keyint=8:bframes=3"}},
        {"ticks": UNEVEN, **SPARSE},
        {"ticks": UNEVEN, "format": "matroska", **SPARSE},
        {"ticks": [7000 + tick for tick in UNEVEN], **SPARSE},
        {"ticks": [7000 + tick for tick in UNEVEN], "format": "matroska", **SPARSE},
    ],
    ids=str,
)
def test_every_frame_is_found_where_it_is_shown(how: dict[str, Any]) -> None:
    data = encode(20, **how)
    assert read(data) == {i: i for i in range(20)}
    for wanted in ([13], [0], [19], [3, 4, 16], [17, 2, 2]):
        assert read(data, wanted) == {i: i for i in sorted(set(wanted))}
    with Video(data) as video:
        if "ticks" in how:
            assert np.allclose(video.times * 1000, UNEVEN, atol=0.1) and video.fps == pytest.approx(19.0)
        else:
            assert np.allclose(video.times, np.arange(20) / 30, atol=1e-3) and video.fps == pytest.approx(30, rel=2e-3)


@pytest.mark.parametrize("num_frames", [1, 2])
@pytest.mark.parametrize("how", [{}, {"format": "matroska"}, MPEG4_WITH_B], ids=str)
def test_very_short_videos(num_frames: int, how: dict[str, Any]) -> None:
    assert read(encode(num_frames, **how)) == {i: i for i in range(num_frames)}


def with_matrix(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """An MP4 whose track header says how to turn it: (x, y) is shown at (a x + c y, b x + d y)."""
    start = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # version and flags, times and numbers, reserved, layer to volume
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return data[:start] + matrix + data[start + 36 :]


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), 1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 3)], ids=["a phone held upright", "on its head", "left"]
)
def test_turned_videos_are_shown_upright(matrix: tuple[int, int, int, int], turns: int) -> None:
    """`turns`: clockwise quarters that the matrix asks for, so the stored pixels are turned the other way."""
    stored = [np.ascontiguousarray(np.rot90(numbered(i), turns)) for i in range(10)]
    data = with_matrix(encode(10, size=stored[0].shape[1::-1], pictures=stored), *matrix)
    with Video(data) as video:
        assert video.size == (64, 48)
        assert short_side(data) == 48
        for index, picture in video.read([4, 9], (32, 24)):
            assert picture.shape == (24, 32, 3) and is_upright(picture) and number_of(picture) == index
    assert read(data) == {i: i for i in range(10)}


@pytest.mark.parametrize(
    ("space", "full", "rgb"),
    # what (Y, Cb, Cr) = (100, 90, 180) is by BT.601, BT.709 and BT.2020, in studio and in full range; untagged counts as BT.601
    [
        (6, False, (181, 70, 21)), (6, True, (173, 76, 33)), (1, False, (191, 78, 17)), (1, True, (182, 83, 30)), (9, False, (185, 71, 16)),
        (2, False, (181, 70, 21)),
    ],
)  # fmt: skip
def test_colours_follow_the_files_colour_space(space: int, full: bool, rgb: tuple[int, int, int]) -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = space, 2 if full else 1
        stream.options = {"crf": "1", "preset": "ultrafast"}
        frame = av.VideoFrame(64, 48, "yuv420p")
        for plane, value in zip(frame.planes, (100, 90, 180), strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with Video(file.getvalue()) as video:
        for size in ((64, 48), (40, 30)):
            [(_, picture)] = video.read([0], size)
            assert np.abs(picture[10, 10].astype(int) - rgb).max() <= 3


def damaged(data: bytes, first: int, last: int) -> bytes:
    """The payload of frames first..last of an MP4 overwritten with noise."""
    import av

    with av.open(io.BytesIO(data), "r") as container:
        packets = [(int(p.pos or 0), p.size) for p in container.demux(video=0) if p.size]
    broken = bytearray(data)
    for position, size in packets[first : last + 1]:
        broken[position + 4 : position + size] = np.random.default_rng(position).bytes(size - 4)
    return bytes(broken)


def test_damaged_packets_are_stood_in_for_by_the_frame_before(capfd: pytest.CaptureFixture[str]) -> None:
    whole = encode(40, gop=10, options={"bf": "0"})
    found = read_numbers(damaged(whole, 13, 15))
    assert len(found) == 40 and [found[i] for i in [*range(13), *range(20, 40)]] == [*range(13), *range(20, 40)]
    assert all(number <= 19 for number in found[13:20])
    assert capfd.readouterr().err == ""


def read_numbers(data: bytes) -> list[int]:
    with Video(data) as video:
        return [number_of(picture) for _, picture in video.read(range(video.num_frames), video.size)]


def test_a_clip_of_mostly_damaged_frames_is_an_error() -> None:
    broken = damaged(encode(40, gop=20, options={"bf": "0"}), 20, 39)
    assert read(broken, [5, 19]) == {5: 5, 19: 19}
    message = r"^(\d+ of 20 frames|no frame) of the clip can('t)? be decoded: the video is damaged"
    with Video(broken) as video, pytest.raises(DataError, match=message):
        list(video.read(range(20, 40), video.size))


@pytest.mark.parametrize("format", ["mp4", "matroska", "avi"])
def test_cut_files_are_errors(format: str) -> None:
    data = encode(20, format=format)
    for length in (40, len(data) // 2, len(data) - 20):
        with pytest.raises(DataError, match=rf"^the video is cut: .* go on to byte [\d,]+ at least, and {length:,} are there$|opened"):
            Video(data[:length])
    for length in (1, 8, 11):
        with pytest.raises(DataError, match="^not a video: |^the video is cut|^video can't be opened"):
            Video(data[:length])


def test_a_cut_file_with_its_index_in_front_is_an_error(tmp_path: Path) -> None:
    """Its first clips could be decoded: whether a sample is bad must not depend on the draw."""
    import av

    file = tmp_path / "video.mp4"
    with av.open(io.BytesIO(encode(20)), "r") as old, av.open(str(file), "w", options={"movflags": "faststart"}) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                new.mux(packet)
    data = file.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat") and read(data) == {i: i for i in range(20)}
    with pytest.raises(DataError, match="^the video is cut: "):
        Video(data[: len(data) - 100])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"^the file is empty$"),
        (b"<!DOCTYPE html><html>", r"^not a video: 21 bytes that start with b'<!DOCTYP'$"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", r"^not a video: "),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", r"^not a video: "),
        (b"\0\0\0\x10ftypisom\0\0\0\0", r"^video can't be opened: "),
        (b"\x1aE\xdf\xa3" + bytes(60), r"^video can't be opened: "),
        (b"RIFF\x30\0\0\0AVI " + bytes(44), r"can't be opened|holds no video"),
    ],
    ids=["empty", "html", "m3u8", "concat", "mp4 of nothing", "mkv of nothing", "avi of nothing"],
)
def test_what_is_no_video_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Video(data)


def test_sound_alone_is_an_error() -> None:
    for format in ("mp4", "matroska"):
        with pytest.raises(DataError, match=r"^the file holds no video, only audio$"):
            Video(encode_sound(format))


def test_frames_above_the_limit_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FRAME_PIXELS == 8192 * 8192
    monkeypatch.setattr("data.video.MAX_FRAME_PIXELS", 64 * 48 - 1)
    with pytest.raises(DataError, match=r"^64 x 48 pixels a frame: more than the limit of 3,071$"):
        Video(encode(2))


def test_only_what_is_needed_is_decoded() -> None:
    """A wanted frame costs at most its group of pictures."""
    data = encode(200, gop=20, options={"bf": "0"})
    with Video(data) as video:
        decoded = 0
        frames_from = video._frames_from

        def counting(key: int) -> Any:
            nonlocal decoded
            for frame in frames_from(key):
                decoded += 1
                yield frame

        video._frames_from = counting  # type: ignore[method-assign]
        assert [(i, number_of(p)) for i, p in video.read([105, 110], video.size)] == [(105, 105), (110, 110)]
        assert decoded == 11
        assert [i for i, _ in video.read([3, 190], video.size)] == [3, 190]
        assert decoded == 11 + 4 + 11


def test_real_clips_decode_as_they_are_probed(shared_data: Path) -> None:
    """Size, length and number of frames of every one; and single frames are those of decoding it from its start."""
    import av

    probes = json.loads((shared_data / "video" / "PROBE.json").read_text())
    assert len(probes) > 25
    for name, probe in probes.items():
        data = (shared_data / name).read_bytes()
        with Video(data) as video:
            assert video.size == (probe["width"], probe["height"]), name
            dropped = probe["packets"] - video.num_frames  # two AVI files have a packet that says: no new frame here
            assert dropped in ((0, 1) if name.endswith(".avi") else (0,)), name
            assert video.times[-1] + 1 / video.fps == pytest.approx(probe["duration"], abs=0.11), name
            wanted = [video.num_frames // 2, video.num_frames - 1] if len(data) < 400_000 else [min(40, video.num_frames - 1)]
            found = dict(video.read(wanted, (32, 24)))
        with av.open(io.BytesIO(data), "r") as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in found:
                    assert np.array_equal(found.pop(index), frame.reformat(32, 24, "rgb24").to_ndarray()), (name, index)
                if not found:
                    break
        assert not found, name
