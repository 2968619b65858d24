"""data/tar.py against tarfile and webdataset where those are right, and against what is written here where they are not."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import tar_maker as tm
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from data.errors import DataError, StaleIndexError
from data.index import build_index
from data.tar import Member, TarDamage, parse_sample, split_name, walk

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
KINDS = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE]

words = st.text("abXY019_- .", min_size=1, max_size=12).map(lambda s: s.strip(" ./") or "w")
long_words = st.integers(1, 240).map(lambda n: "l" * n)
exotic_words = st.sampled_from(["größe", "写真", "é" * 60, "a b", "%20", "ж" * 110])


def make_tar(entries: list[tuple[str, bytes, bytes]], fmt: int, mtime: float = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt) as archive:
        for name, data, kind in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, mtime  # type: ignore[assignment]
            info.size = len(data) if kind in (tarfile.REGTYPE, tarfile.CONTTYPE) else 0
            info.linkname = "target" * 30 if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) and fmt != tarfile.USTAR_FORMAT else ""
            archive.addfile(info, io.BytesIO(data) if info.size else None)
    return out.getvalue()


def read_samples(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    offsets, damage = build_index(str(path))
    assert damage is None
    content = path.read_bytes()
    ranges = [(int(a), int(b)) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    return [parse_sample(content[a:b], a, path.name) for a, b in ranges]


def read_with_webdataset(content: bytes) -> list[tuple[str, dict[str, bytes]]]:
    samples = group_by_keys(tar_file_expander([{"url": "x", "stream": io.BytesIO(content)}]))
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.one_of(words, long_words, exotic_words), min_size=1, max_size=4).map("/".join),
            st.one_of(st.binary(max_size=30), st.integers(0, 2000).map(bytes)),
            st.sampled_from([tarfile.REGTYPE] * 8 + KINDS),
        ),
        max_size=12,
    ),
    st.sampled_from(["gnu", "pax"]),
    st.sampled_from([0, 1_700_000_000, 1_700_000_000.25]),
)
def test_walk_is_tarfile(entries: list[tuple[str, bytes, bytes]], fmt: str, mtime: float) -> None:
    content = make_tar(entries, FORMATS[fmt], mtime if fmt == "pax" else int(mtime))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        expected = [(m.name, m.offset, m.offset_data, m.size, m.isreg()) for m in archive]
    for buf in (content, memoryview(content), bytearray(content)):
        assert [(m.name.rstrip("/"), *m[1:]) for m in walk(buf)] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 98), st.binary(max_size=600)), max_size=8))
def test_walk_is_tarfile_with_ustar_prefixes(entries: list[tuple[int, int, bytes]]) -> None:
    content = make_tar([("d" * a + "/" + "f" * b, data, tarfile.REGTYPE) for a, b, data in entries], FORMATS["ustar"])
    assert [(m.name, m.size) for m in walk(content)] == [("d" * a + "/" + "f" * b, len(data)) for a, b, data in entries]


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar command")
@pytest.mark.parametrize("fmt", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_walk_of_what_the_tar_command_writes(tmp_path: Path, fmt: str) -> None:
    folder = tmp_path / "d" / "/".join(["sub"] * {"v7": 8, "ustar": 20}.get(fmt, 40))
    folder.mkdir(parents=True)
    for name in ("größe.jpg", "a.cls", "empty.txt", "x" * 40 + ".jpg"):
        (folder / name).write_bytes(b"" if name == "empty.txt" else name.encode() * 100)
    (folder / "link.jpg").symlink_to("größe.jpg")
    os.link(folder / "a.cls", folder / "b.cls")
    if fmt != "v7":
        os.mkfifo(folder / "fifo")
    subprocess.run(["tar", f"--format={fmt}", "-cf", "x.tar", "d"], cwd=tmp_path, check=True, capture_output=True)
    with tarfile.open(tmp_path / "x.tar") as archive:
        expected = [(m.name, m.offset, m.offset_data, m.size if m.isreg() else 0, m.isreg()) for m in archive]
    assert [(m.name.rstrip("/"), *m[1:]) for m in walk((tmp_path / "x.tar").read_bytes())] == expected
    assert sum(m[4] for m in expected) >= 4


keys = st.lists(words.map(lambda w: w.replace(".", "") or "k"), min_size=1, max_size=2).map("/".join)
fields = st.sampled_from(["jpg", "JPG", "cls", "seg.png", "json", "T_cam.npy", ""])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(keys, st.lists(fields, min_size=1, max_size=4, unique_by=str.lower), st.booleans()), max_size=10),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
def test_samples_are_webdatasets(tmp_path_factory: pytest.TempPathFactory, samples: list, fmt: str, dotted: bool) -> None:
    entries: list[tuple[str, bytes, bytes]] = []
    before = ""
    for key, names, folder in samples:
        if key == before or key.startswith("__"):
            continue
        before = key
        if folder:
            entries.append(("some.folder", b"", tarfile.DIRTYPE))
            entries.append(("a.link", b"", tarfile.SYMTYPE))
            entries.append(("no_dot", b"xx", tarfile.REGTYPE))
        prefix = "./" if dotted else ""
        entries += [(f"{prefix}{key}.{name}", f"{key} {name} {i}".encode(), tarfile.REGTYPE) for i, name in enumerate(names)]
    path = tmp_path_factory.mktemp("wds") / "x.tar"
    path.write_bytes(make_tar(entries, FORMATS[fmt]))
    assert read_samples(path) == read_with_webdataset(path.read_bytes())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a.seg.PNG", ("a", "seg.png")),
        ("d.e/a.b.c", ("d.e/a", "b.c")),
        ("./a.jpg", ("./a", "jpg")),
        ("a.", ("a", "")),
        ("a..jpg", ("a", ".jpg")),
        ("größe/写真.jpg", ("größe/写真", "jpg")),
        ("no_dot", None),
        ("d.e/no_dot", None),
        ("d.e/", None),
        ("./", None),
        ("..", None),
        ("", None),
        (".hidden", None),
        ("d/.hidden.jpg", None),
        ("._a.jpg", None),
        ("d/._a.jpg", None),
        (".DS_Store", None),
        ("d/.DS_Store", None),
        ("__MACOSX/a.jpg", None),
        ("__MACOSX/._a.jpg", None),
        ("d/__MACOSX/e/a.jpg", None),
        ("d__MACOSX/a.jpg", ("d__MACOSX/a", "jpg")),
        ("__meta.json__", None),
        ("__meta__/a.json", None),
        ("__a.jpg", ("__a", "jpg")),
        ("d/__meta__/a.jpg", ("d/__meta__/a", "jpg")),
    ],
)
def test_split_name(name: str, parts: tuple[str, str] | None) -> None:
    assert split_name(name) == parts


def names(content: bytes) -> list[tuple[str, int, int]]:
    return [(m.name, m.offset, m.size) for m in walk(content) if m.is_file]


def test_gnu_header_has_no_prefix() -> None:
    """GNU tar --incremental keeps times where POSIX has the prefix; tarfile and webdataset make a folder of them."""
    content = tm.member("a.jpg", b"x", magic=tm.GNU, prefix=b"14400000000\0") + tm.END
    assert names(content) == [("a.jpg", 0, 1)]
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() != ["a.jpg"]  # once it is, tarfile can be trusted here too


@pytest.mark.parametrize("magic", [tm.POSIX, b"ustar\0\0\0", tm.GNU, tm.V7])
def test_magics(magic: bytes) -> None:
    assert names(tm.member("a.jpg", b"xyz", magic=magic) + tm.END) == [("a.jpg", 0, 3)]


def test_v7() -> None:
    content = tm.member("d/", b"", b"\0", magic=tm.V7) + tm.member("d/a.jpg", b"xyz", b"\0", magic=tm.V7) + tm.END
    assert list(walk(content)) == [Member("d/", 0, 512, 0, False), Member("d/a.jpg", 512, 1024, 3, True)]


def test_prefix_is_for_posix_only_and_may_be_full() -> None:
    content = tm.member("a.jpg", b"x", prefix=b"p" * 155) + tm.member(b"n" * 96 + b".jpg", b"y", prefix=b"q")
    assert names(content) == [("p" * 155 + "/a.jpg", 0, 1), ("q/" + "n" * 96 + ".jpg", 1024, 1)]


def test_long_names() -> None:
    name = "folder/" * 40 + "a.jpg"
    link = tm.member("././@LongLink", b"t" * 600 + b"\0", b"K", magic=tm.GNU)
    content = tm.long_name(name) + tm.member(name[:100], b"xy", magic=tm.GNU) + link + tm.long_name(name) + tm.member("l", b"", b"2")
    assert list(walk(content)) == [
        Member(name, 0, 1536, 2, True),
        Member(name, 2048, 2048 + 512 * 6, 0, False),
    ]


def test_pax_path_and_size_win() -> None:
    content = tm.pax({"mtime": "1.5", "path": "größe/" + "x" * 200 + ".jpg", "size": "1000"}) + tm.header(b"short.jpg", 0) + bytes(1024)
    content += tm.pax({"mtime": "1.5"}) + tm.member("b.jpg", b"zz") + tm.END
    assert names(content) == [("größe/" + "x" * 200 + ".jpg", 0, 1000), ("b.jpg", 2560, 2)]


def test_pax_header_of_times_only_belongs_to_its_member() -> None:
    content = tm.pax({"atime": "1.5", "ctime": "2"}) + tm.member("a.jpg", b"zz", prefix=b"d") + tm.END
    assert list(walk(content)) == [Member("d/a.jpg", 0, 1536, 2, True)]


def test_global_pax_header_is_passed_over() -> None:
    """git archive writes one; a path in it would name every member."""
    content = tm.pax({"comment": "0123", "path": "all.jpg"}, b"g") + tm.member("a.jpg", b"zz") + tm.END
    assert names(content) == [("a.jpg", 1024, 2)]


def test_base_256_size() -> None:
    field = b"\x80" + (3).to_bytes(11, "big")
    assert names(tm.header(b"a.jpg", size_field=field) + tm.pad(b"xyz") + tm.END) == [("a.jpg", 0, 3)]
    huge = b"\x80" + (1 << 40).to_bytes(11, "big")
    with pytest.raises(TarDamage, match="the data of 'a.jpg' is cut .512 of 1099511627776 bytes are there. at byte 0"):
        list(walk(tm.header(b"a.jpg", size_field=huge) + bytes(512)))


@pytest.mark.parametrize("field", [b"          3 ", b"3\0          ", b" 3 \0        ", b"000000000003", b"0000000003\0 "])
def test_octal_sizes_of_other_writers(field: bytes) -> None:
    assert names(tm.header(b"a.jpg", size_field=field) + tm.pad(b"xyz") + tm.END) == [("a.jpg", 0, 3)]


@pytest.mark.parametrize("field", [b"\xff" * 12, b"0000000000x\0", b"-0000000003\0"])
def test_broken_sizes(field: bytes) -> None:
    with pytest.raises(TarDamage, match="broken size in a header at byte 1024"):
        list(walk(tm.member("a.jpg", b"x") + tm.header(b"b.jpg", size_field=field) + tm.END))


def test_signed_checksum() -> None:
    """Old tars summed signed bytes; it differs where a name is not ASCII."""
    content = tm.member("größe.jpg", b"x", signed=True) + tm.END
    assert content[148:156] != tm.member("größe.jpg", b"x")[148:156]
    assert names(content) == [("größe.jpg", 0, 1)]


def test_every_flipped_header_byte_is_seen() -> None:
    first, second = tm.member("a.jpg", b"x"), tm.member("b.jpg", b"y")
    for i in set(range(512)) - {155}:  # after the checksum's NUL: says nothing
        broken = bytearray(second)
        broken[i] ^= 0x15
        with pytest.raises(TarDamage, match="broken header at byte 1024|broken size") as caught:
            list(walk(first + bytes(broken) + tm.END))
        assert caught.value.offset == 1024


def test_names_that_are_not_utf8_survive() -> None:
    (found,) = walk(tm.member(b"caf\xe9.jpg", b"x"))
    assert found.name.encode("utf-8", "surrogateescape") == b"caf\xe9.jpg"


def test_links_devices_directories_have_no_data() -> None:
    """Their size field is not to be believed: some writers put the size of the target there."""
    content = b"".join(tm.header(b"x.%c" % kind, 5000, kind=b"%c" % kind) for kind in b"123456") + tm.member("a.jpg", b"y") + tm.END
    assert [(m.size, m.is_file) for m in walk(content)] == [(0, False)] * 6 + [(1, True)]


def test_unknown_types_are_passed_over_with_their_data() -> None:
    content = tm.member("label", b"", b"V") + tm.member("dump", b"xyz", b"D") + tm.member("w", b"xyz", b"W") + tm.member("a.jpg", b"y")
    assert [(m.name, m.is_file) for m in walk(content)] == [("label", False), ("dump", False), ("w", False), ("a.jpg", True)]


def test_contiguous_files_are_files() -> None:
    assert names(tm.member("a.jpg", b"y", b"7")) == [("a.jpg", 0, 1)]


@pytest.mark.parametrize("start", [tm.header(b"a.jpg", 0, b"S"), tm.pax({"GNU.sparse.major": "1"}) + tm.header(b"a.jpg")])
def test_sparse_files_are_not_taken_for_others(start: bytes) -> None:
    with pytest.raises(TarDamage, match="a sparse file .tar --sparse., which can't be read, at byte 1024"):
        list(walk(tm.member("0.jpg", b"x") + start + tm.END))


def test_end_blocks_may_be_missing_and_padding_too() -> None:
    content = tm.member("a.jpg", b"x" * 600)
    assert names(content) == names(content[: 512 + 600]) == [("a.jpg", 0, 600)]


@pytest.mark.parametrize("num_zeros", [1, 2, 20, 3000])
def test_joined_archives(num_zeros: int) -> None:
    first = tm.member("a.jpg", b"x") + bytes(512 * num_zeros)
    assert names(first + tm.member("b.jpg", b"y") + tm.END) == [("a.jpg", 0, 1), ("b.jpg", len(first), 1)]


def test_empty_archives() -> None:
    assert list(walk(b"")) == list(walk(tm.END)) == list(walk(bytes(10240 + 100))) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tm.member("b.jpg", b"y")[:300], "cut in a header"),
        (tm.member("b.jpg", b"y" * 600)[:1000], r"the data of 'b.jpg' is cut \(488 of 600 bytes are there\)"),
        (tm.member("b.jpg", b"y" * 600)[:512], r"the data of 'b.jpg' is cut \(0 of 600 bytes are there\)"),
        (tm.pax({"mtime": "1.5"})[:600], "cut in a header"),
        (tm.pax({"mtime": "1.5"})[:512], "cut in an extended header"),
        (tm.pax({"mtime": "1.5"}), "cut in a header"),
        (tm.pax({"path": "x.jpg"}), "cut in a header"),
        (tm.pax({"path": "x.jpg"}) + tm.END, "broken header"),
        (tm.pax({"mtime": "1.5"}) + tm.END, "broken header"),
        (tm.long_name("x" * 120) + tm.header(b"x" * 100)[:200], "cut in a header"),
        (b"<html>" + bytes(1000), "broken header"),
        (tm.member("PaxHeader", b"99 path=x\n", b"x") + tm.member("b.jpg"), "broken PAX header"),
        (tm.member("PaxHeader", b"path=x\n", b"x") + tm.member("b.jpg"), "broken PAX header"),
        (tm.member("PaxHeader", b"10 size=x\n", b"x") + tm.member("b.jpg"), "broken PAX header"),
    ],
)
def test_damage(content: bytes, reason: str) -> None:
    found = []
    with pytest.raises(TarDamage, match=rf"^{reason} at byte 8024$") as caught:
        for member in walk(tm.member("a.jpg", b"x") + content, base=7000):
            found.append(member.name)
    assert found == ["a.jpg"] and caught.value.offset == 8024


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=1500), st.integers(0, 3000))
def test_garbage_is_damage_and_nothing_else(garbage: bytes, where: int) -> None:
    content = bytearray(tm.join_samples(tm.make_samples(2)) + tm.END)
    content[where : where + len(garbage)] = garbage
    try:
        for member in walk(bytes(content)):
            assert member.data_offset + member.size <= len(content)
    except TarDamage:
        pass


def test_walk_of_a_part() -> None:
    content = tm.join_samples(tm.make_samples(3))
    assert [m.name for m in walk(content, 2048, 4096)] == ["0001.jpg", "0001.cls"]
    with pytest.raises(TarDamage, match="at byte 3072"):
        list(walk(content, 2048, 3500))


def test_parse_sample() -> None:
    content = tm.member("d/a.JPG", b"x") + tm.member("d/", b"", b"5") + tm.member("d/a.seg.png", b"") + tm.member("._x", b"zz")
    assert parse_sample(content, 0, "0.tar") == ("d/a", {"jpg": b"x", "seg.png": b""})
    key, found = parse_sample(memoryview(content), 0, "0.tar")
    assert type(found["jpg"]) is bytes  # stages and decoders may do with it what they do with bytes


def test_field_twice_is_a_bad_sample_with_its_key() -> None:
    content = tm.member("a.jpg", b"x") + tm.member("a.cls", b"1") + tm.member("a.JPG", b"y")
    with pytest.raises(DataError, match="jpg: the sample has this field twice") as caught:
        parse_sample(content, 0, "0.tar")
    assert (caught.value.key, caught.value.field) == ("a", "jpg")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no sample starts there"),
        (tm.END, "no sample starts there"),
        (bytes(512) + tm.member("a.jpg", b"x"), "no sample starts there"),
        (tm.member("d/", b"", b"5") + tm.member("a.jpg", b"x"), "no sample starts there"),
        (tm.member("a.jpg", b"x")[100:], "broken header at byte 512"),
        (tm.member("a.jpg", b"x" * 600)[:700], r"the data of 'a.jpg' is cut \(188 of 600 bytes are there\) at byte 512"),
        (tm.member("a.jpg", b"x") + tm.member("b.jpg", b"y"), "it holds 'a' and 'b'"),
    ],
)
def test_bytes_that_are_no_sample_mean_a_stale_index(content: bytes, why: str) -> None:
    with pytest.raises(StaleIndexError) as caught:
        parse_sample(content, 512, "0.tar")
    message = str(caught.value)
    assert message.startswith("0.tar: its index does not fit it: sample at byte 512: ")
    assert message.endswith("; delete the .idx file or run scripts/index_shards.py")
    assert re.search(why, message)


def test_members_that_are_gzipped_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tm.member("a.txt.gz", gzip.compress(b"text")) + tm.END)
    ((key, found),) = read_samples(path)
    assert key == "a" and gzip.decompress(found["txt.gz"]) == b"text"
