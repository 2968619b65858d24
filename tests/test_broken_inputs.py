"""Every broken or odd tar that is known, one row each: what comes out of build_loader.

A row says what is in the shard, what its samples become in order (the number of the picture that loads, with its pixels and label;
or the line that names a masked one), how the damage of the shard is told, and which test looks at the same input closer.
"""
# ruff: noqa: E501  (tables: one input, one line)

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from picture_maker import encode
from tar_maker import END, GNU, header, long_name, member, pad, pax

from data import ShardError, build_loader


def pixels(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (8, 8, 3), np.uint8)


def picture(n: int) -> bytes:
    return encode(pixels(n))


def sample(n: int, key: str = "", **more: Any) -> bytes:
    """Picture n with its label n, under the key "n" or another."""
    return member(f"{key or n}.png", picture(n), **more) + member(f"{key or n}.cls", b"%d" % n, **more)


def some(*numbers: int) -> bytes:
    return b"".join(map(sample, numbers))


def label(n: int, key: str = "") -> bytes:
    return member(f"{key or n}.cls", b"%d" % n)


class Row(NamedTuple):
    what: str
    content: bytes
    out: list[int | str]  # a picture's number, or the error of a masked slot without "x.tar sample i "
    also: str  # where else it is tested
    damage: str = ""  # of the shard: what its line starts with
    name: str = "x.tar"


FAR = "folder/" * 40 + "0"
SIZE = len(picture(1))
NO_PICTURE = "no picture: the sample's fields are cls"
TIMES = {"mtime": "1700000000.25"}
ODD = [header(b"d", 0, b"5"), header(b"c", 5000, b"3"), header(b"b", 5000, b"4"), header(b"f", 0, b"6"), member("v", b"xyz", b"V")]
MAC = member("._0.png", b"mac") + member(".DS_Store", b"\0") + member("__MACOSX/._0.cls", b"mac") + member("d/._1.png", b"mac")
LARGE = b"".join(member(f"{n}.png", picture(n) + bytes(2560)) + label(n) for n in range(6)) + END
FLIPPED = bytearray(some(0, 1, 2) + END)
FLIPPED[len(some(0)) + 7] ^= 1
assert LARGE.index(b"4.png") + 512 < 20480 < LARGE.index(b"4.cls")

ROWS = [
    Row("GNU long names", long_name(FAR + ".png") + member("x", picture(0), magic=GNU) + long_name(FAR + ".cls") + member("x", b"0") + some(1) + END, [0, 1], "test_tar.py::test_long_names"),
    Row("PAX names", pax({"path": FAR + ".png"}) + member("x", picture(0)) + pax({"path": FAR + ".cls"}) + member("x", b"0") + some(1) + END, [0, 1], "test_tar.py::test_pax_path_and_size_win"),
    Row("PAX times", pax(TIMES) + member("0.png", picture(0)) + pax(TIMES) + label(0) + some(1) + END, [0, 1], "test_tar.py::test_pax_header_of_times_only_belongs_to_its_member"),
    Row("global PAX header", pax({"comment": "1", "path": "all.png"}, b"g") + some(0, 1) + END, [0, 1], "test_tar.py::test_global_pax_header_is_passed_over"),
    Row("prefix", sample(0, prefix=b"p" * 155) + sample(0, "1", prefix=b"p") + END, [0, 0], "test_tar.py::test_prefix_is_for_posix_only_and_may_be_full"),
    Row("./", member("./", b"", b"5") + sample(0, "./0") + sample(1, "./1") + END, [0, 1], "test_tar.py::test_split_name"),
    Row("dots in folders", sample(0, "v1.0/a.b/0") + sample(1, "v1.0/a.c/0") + END, [0, 1], "test_tar.py::test_split_name"),
    Row("directories", member("d.e/", b"", b"5") + sample(0, "d.e/0") + member("d.f/", b"", b"5") + sample(1, "d.f/0") + END, [0, 1], "test_index.py::test_passed_over_members_neither_start_nor_end_a_sample"),
    Row("macOS side files", MAC + some(0) + MAC + member("1.png", picture(1)) + MAC + label(1) + MAC + END, [0, 1], "test_tar.py::test_split_name"),
    Row("upper case extensions", member("0.PNG", picture(0)) + member("0.CLS", b"0") + some(1) + END, [0, 1], "test_tar.py::test_parse_sample"),
    Row("NFD names, and the same in NFC", sample(0, "e\u0301t\u00e9") + sample(1, "\u00e9t\u00e9") + END, [0, 1], ""),
    Row("names that are not UTF-8", member(b"caf\xe9.png", picture(0)) + member(b"caf\xe9.cls", b"0") + member(b"\xff.cls", b"1") + some(2) + END, [0, rf"(\udcff): {NO_PICTURE}", 2], "test_tar.py::test_names_that_are_not_utf8_survive"),
    Row("names with control characters", label(1, "a\nb\x1b[2J") + some(0) + END, [rf"(a\nb\x1b[2J): {NO_PICTURE}", 0], ""),
    Row("field names with control characters", some(0) + member("1.a\n\x1b", b"") + label(1) + END, [0, r"(1): no picture: the sample's fields are a\n\x1b, cls"], ""),
    Row("absolute names and ..", sample(0, "/etc/0") + sample(1, "../../1") + sample(2, "a/../2") + END, [0, 1, 2], "test_security.py::test_names_in_a_tar_are_no_paths"),
    Row("hard link", some(0) + header(b"1.png", SIZE, b"1") + label(1) + some(2) + END, [0, f"(1): {NO_PICTURE}", 2], "test_tar.py::test_links_devices_directories_have_no_data"),
    Row("symbolic link", some(0) + header(b"1.png", SIZE, b"2") + label(1) + some(2) + END, [0, f"(1): {NO_PICTURE}", 2], "test_tar.py::test_links_devices_directories_have_no_data"),
    Row("devices, fifos, unknown types", b"".join(ODD) + some(0) + b"".join(ODD) + some(1) + END, [0, 1], "test_tar.py::test_unknown_types_are_passed_over_with_their_data"),
    Row("sparse (GNU)", some(0) + header(b"1.png", SIZE, b"S") + pad(picture(1)) + label(1) + END, [0], "test_tar.py::test_sparse_files_are_not_taken_for_others", "a sparse file (tar --sparse), which can't be read, at byte 2048"),
    Row("sparse (PAX)", some(0) + pax({"GNU.sparse.major": "1"}) + some(1) + END, [0], "test_tar.py::test_sparse_files_are_not_taken_for_others", "a sparse file (tar --sparse), which can't be read, at byte 2048"),
    Row("base-256 size", header(b"1.png", size_field=b"\x80" + SIZE.to_bytes(11, "big")) + pad(picture(1)) + label(1) + END, [1], "test_tar.py::test_base_256_size"),
    Row("negative size", some(0) + header(b"1.png", size_field=b"\xff" * 12) + some(2) + END, [0], "test_tar.py::test_broken_sizes", "broken size in a header at byte 2048"),
    Row("huge size", some(0) + header(b"1.png", size_field=b"\x80" + b"\x7f" * 11) + some(2) + END, [0], "test_tar.py::test_base_256_size", "the data of '1.png' is cut ("),
    Row("PAX size", pax({"size": str(SIZE)}) + header(b"1.png") + pad(picture(1)) + label(1) + END, [1], "test_tar.py::test_pax_path_and_size_win"),
    Row("negative PAX size", some(0) + pax({"size": "-1"}) + some(1) + END, [0], "test_tar.py::test_damage", "broken PAX header at byte 2048"),
    Row("PAX size of 5,000 digits", some(0) + pax({"size": "9" * 5000}) + some(1) + END, [0], "", "broken PAX header at byte 2048"),
    Row("no end block", some(0, 1), [0, 1], "test_index.py::test_missing_end_blocks"),
    Row("one end block", some(0, 1) + bytes(512), [0, 1], "test_tar.py::test_joined_archives"),
    Row("joined archives", some(0) + END + some(1) + bytes(9000 // 512 * 512) + some(2) + END, [0, 1, 2], "test_index.py::test_joined_archives_are_one_shard_whose_samples_stay_apart"),
    Row("junk after the end", some(0, 1) + END + b"junk" * 1000, [0, 1], "test_index.py::test_damage", "broken header at byte "),
    Row("a little junk after the end", some(0, 1) + END + b"junk", [0, 1], "test_index.py::test_damage", "cut in a header at byte "),
    Row("cut in a header", some(0, 1) + some(2)[:100], [0, 1], "test_index.py::test_damage", "cut in a header at byte "),
    Row("cut in data", some(0, 1) + some(2)[:600], [0, 1], "test_index.py::test_damage", "the data of '2.png' is cut (88 of "),
    Row("cut in padding", some(0, 1)[:-100], [0, 1], "test_index.py::test_damage", "cut in the padding of the last member at byte "),
    Row("cut between members", some(0, 1) + member("2.png", picture(2)), [0, 1, "(2): cls: no label: the sample's fields are png"], "test_index.py::test_cut_between_members_is_no_damage"),
    Row("cut at a record", LARGE[:20480], [0, 1, 2, 3], "test_index.py::test_damage", "the data of '4.png' is cut ("),
    Row("flipped header byte", bytes(FLIPPED), [0], "test_tar.py::test_every_flipped_header_byte_is_seen", "broken header at byte 2048"),
    Row("a tail of zeros", some(0, 1) + bytes(3 << 20), [0, 1], "", "nothing but zeros, as a download leaves that made room and broke off, at byte "),
    Row(".tar.gz", gzip.compress(some(0, 1) + END), [0, 1], "test_store.py::test_gzip_is_decompressed_once", name="x.tar.gz"),
    Row(".tgz", gzip.compress(some(0, 1) + END), [0, 1], "test_store.py::test_gzip_is_decompressed_once", name="x.tgz"),
    Row("gzip named .tar", gzip.compress(some(0, 1) + END), [0, 1], "test_store.py::test_gzip_is_decompressed_once"),
    Row("several gzip members", gzip.compress(some(0, 1)[:700]) + gzip.compress(some(0, 1)[700:]) + gzip.compress(END), [0, 1], "test_store.py::test_several_gzip_members"),
    Row("cut gzip", gzip.compress(some(0, 1)) + gzip.compress(some(2))[:10], [0, 1], "test_store.py::test_cut_gzip_keeps_what_decompresses", "the gzip stream is cut or broken at byte "),
    Row("interleaved keys", member("0.png", picture(0)) + member("1.png", picture(1)) + label(0) + label(1) + some(2) + END,
        ["(0): cls: no label: the sample's fields are png", "(1): cls: no label: the sample's fields are png", f"(0): {NO_PICTURE}", f"(1): {NO_PICTURE}", 2], "test_index.py::test_one_key_in_two_places_is_two_samples"),
    Row("one key twice in a row", sample(0, "a") + sample(1, "a") + some(2) + END, ["(a): png: the sample has this field twice", 2], "test_tar.py::test_field_twice_is_a_bad_sample_with_its_key"),
    Row("one key twice, far apart", sample(0, "a") + some(1) + sample(2, "a") + END, [0, 1, 2], "test_index.py::test_one_key_in_two_places_is_two_samples"),
    Row("two pictures", member("0.jpg", picture(0)) + some(0, 1) + END, ["(0): jpg: 2 pictures in one sample: jpg, png", 1], "test_tasks.py::test_bad_samples"),
    Row("no picture in one", label(0) + some(1) + END, [f"(0): {NO_PICTURE}", 1], "test_tasks.py::test_bad_samples"),
    Row("no label in one", member("0.png", picture(0)) + some(1) + END, ["(0): cls: no label: the sample's fields are png", 1], "test_tasks.py::test_bad_samples"),
    Row("no picture in any, though the size is given", label(0) + label(1) + END, [f"(0): {NO_PICTURE}", f"(1): {NO_PICTURE}"], ""),
    Row("empty picture, empty label, both empty", member("0.png") + label(0) + member("1.png", picture(1)) + member("1.cls") + member("2.png") + member("2.cls") + some(3) + END,
        ["(0): png: the file is empty", "(1): cls: the label is empty", "(2): cls: the label is empty", 3], "test_bad_pictures.py::test_what_is_no_picture"),
]  # fmt: skip

REFUSED = [
    ("zero bytes", b"", "empty (0 bytes): no tar in it; download or make it again", "test_index.py::test_not_a_tar"),
    ("zeros", bytes(10240), "the shards hold no samples; give shards that do", "test_index.py::test_no_samples"),
    ("many zeros", bytes(2 << 20), "broke off, at byte 0: 2097152 bytes after its first 0 samples are not used); give shards that do", ""),
    ("random bytes", np.random.default_rng(1).bytes(20000), "not a tar (it starts with b'", "test_index.py::test_not_a_tar"),
    ("HTML page", b"<!DOCTYPE html><html>" + b" " * 2000, "a web page, not a tar: its download failed", "test_index.py::test_not_a_tar"),
    ("a text", b"hello\n", "not a tar (it starts with b'hello\\n')", "test_index.py::test_not_a_tar"),
    ("zstd", b"\x28\xb5\x2f\xfd" + b"x" * 600, "compressed with zstd, which has no random access: decompress it first (zstd -d)", "test_store.py::test_what_else_may_be_in_a_file"),
    ("first header broken", b"x" + some(0)[1:], "broken header at byte 0: ", "test_index.py::test_damage"),
    ("first file sparse", header(b"0.png", 9, b"S") + some(1), "a sparse file (tar --sparse), which can't be read, at byte 0: ", ""),
    ("no label in any", member("0.png", picture(0)) + member("1.png", picture(1)), "no label field 'cls' in ", "test_classes.py::test_a_label_field_that_no_sample_has"),
    ("no picture in any, and no size given", label(0) + label(1), "no picture field in ", "test_scan.py::test_default_img_size_without_pictures"),
    ("neither in any", member("0.txt", b"x"), "the fields of its first samples are txt; say where the label is with --label", "test_classes.py::test_a_label_field_that_no_sample_has"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(paths: list[str], out: list[int | str], **more: Any) -> Any:
    """Read all once, in order, and compare with what should come out; returns the loader."""
    loader = build_loader(paths, **{"batch_size": len(out), "training": False, "img_size": 8, "num_classes": 10, **more})
    assert loader.num_samples == len(out)
    (batch,) = loader
    assert batch["valid"].tolist() == [isinstance(n, int) for n in out]
    for slot, n in enumerate(out):
        if isinstance(n, int):
            assert batch["label"][slot] == n
            assert (batch["image"][slot].permute(1, 2, 0).numpy() == pixels(n)).all()
    errors = [re.sub(r"^\S+ sample \d+ ", "", str(error)) for error in batch["errors"]]
    assert errors == [line for line in out if isinstance(line, str)]
    assert all(str(error).isprintable() for error in batch["errors"])
    return loader


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_shard_gives(tmp_path: Path, row: Row) -> None:
    (tmp_path / row.name).write_bytes(row.content)
    for _ in range(2):  # with the index to make, and with it made
        (shard,) = check([str(tmp_path / row.name)], row.out).shards
        damage = shard.damage or ""
        assert damage.startswith(row.damage) and bool(damage) == bool(row.damage)
        assert len(damage) < 250 and damage.isprintable()


@pytest.mark.parametrize(("content", "message"), [row[1:3] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_shard_is_refused_with_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    for _ in range(2):
        with pytest.raises(ShardError) as caught:
            build_loader(str(tmp_path), batch_size=2, training=False)
        assert message in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 400
        assert "x.tar" in str(caught.value) or content == bytes(10240)  # an empty tar is nothing that must be mended


def test_one_key_in_two_shards_is_two_samples(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(member("a.png", picture(0)) + label(0, "a"))
    (tmp_path / "1.tar").write_bytes(label(1, "a") + member("a.png", picture(1)) + END)
    check([str(tmp_path / name) for name in ("0.tar", "1.tar")], [0, 1])


def test_a_sample_cut_in_two_by_shards_is_two_bad_ones(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(some(3) + member("a.png", picture(0)) + END)
    (tmp_path / "1.tar").write_bytes(label(0, "a") + END)
    paths = [str(tmp_path / name) for name in ("0.tar", "1.tar")]
    check(paths, [3, "(a): cls: no label: the sample's fields are png", f"(a): {NO_PICTURE}"])


def test_a_damaged_shard_among_others_costs_only_its_own_loss(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(some(0, 1) + END)
    broken = bytearray(some(2, 3, 4, 5, 6, 7) + END)
    broken[broken.index(b"5.png")] ^= 1
    (tmp_path / "1.tar").write_bytes(broken)
    (tmp_path / "2.tar").write_bytes(some(8, 9) + END)
    loader = check([str(tmp_path / f"{n}.tar") for n in range(3)], [0, 1, 2, 3, 4, 8, 9])
    assert [bool(shard.damage) for shard in loader.shards] == [False, True, False]
    assert loader.shards[1].damage == "broken header at byte 6144: 7168 bytes after its first 3 samples are not used (about 4 samples)"


def test_the_tests_that_the_tables_refer_to_exist() -> None:
    here = Path(__file__).parent
    for reference in [row.also for row in ROWS] + [row[3] for row in REFUSED]:
        file, _, test = reference.partition("::")
        assert not file or f"\ndef {test}(" in (here / file).read_text(), reference
