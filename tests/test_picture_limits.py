"""Small files that ask for much memory: masked before they get it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tar_maker as tm
from picture_maker import encode, png

from data import build_loader
from data.decoders import decode
from data.errors import DataError

PICTURE = encode(np.full((8, 8, 3), 77, np.uint8))


def peak_growth(act: Callable[[], object]) -> int:
    """By how many bytes the peak of this process's memory grew."""

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError as error:
        pytest.skip(f"no peaks of memory here: {error}")
    before = read("VmRSS:")
    act()
    return read("VmHWM:") - before


def absurd_pictures() -> dict[str, bytes]:
    """Tiny files whose headers promise tens of gigabytes."""
    side = 100_000
    jpeg, webp = bytearray(encode(np.zeros((8, 8, 3), np.uint8), "JPEG")), bytearray(encode(np.zeros((8, 8, 3), np.uint8), "WEBP"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = b"\xff\xff\xff\xff"
    at = webp.index(b"\x9d\x01\x2a") + 3
    webp[at : at + 4] = b"\xff\x3f\xff\x3f"
    gif = b"GIF89a\xff\xff\xff\xff\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;"
    bmp = b"BM" + bytes(8) + b"\x36\0\0\0\x28\0\0\0" + side.to_bytes(4, "little") * 2 + b"\1\0\x18\0" + bytes(24)
    return {
        "png": png(side, side, 8, 2, b"\0"), "jpg": bytes(jpeg), "webp": bytes(webp), "gif": gif, "bmp": bmp,
        "ppm": b"P6 %d %d 255\n" % (side, side), "tif": tiff(side),
    }  # fmt: skip


def tiff(side: int) -> bytes:
    tags = [(256, 4, side), (257, 4, side), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 4, side), (279, 4, 8)]
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0\x10\0\0\0" + bytes(8) + len(tags).to_bytes(2, "little") + rows + bytes(4)


@pytest.mark.parametrize("kind", sorted(absurd_pictures()))
def test_an_absurd_picture_is_masked_before_it_takes_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tm.join_samples([("0", {"png": PICTURE, "cls": b"0"}), ("1", {kind: absurd_pictures()[kind], "cls": b"0"})]) + tm.END)

    def load() -> None:
        (batch,) = build_loader(str(path), batch_size=2, training=False, img_size=8)
        assert batch["valid"].tolist() == [True, False]
        assert "pixels: more than the limit of 178,956,970" in batch["errors"][0].reason or "exceeds limit" in batch["errors"][0].reason

    load()  # imports
    assert peak_growth(load) < 64 << 20


def test_a_compressed_text_in_a_picture_does_not_unfold(tmp_path: Path) -> None:
    bomb = png(1, 1, 8, 2, b"\0abc", (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(300 << 20), 9)))
    assert len(bomb) < 400_000

    def load() -> None:
        try:
            assert decode("png", bomb).tolist() == [[[97, 98, 99]]]
        except DataError as error:
            assert "Decompressed data too large" in str(error)

    assert peak_growth(load) < 64 << 20
