"""data/patterns.py: every way to name shards, and what is said when one names nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import ShardError
from data.patterns import expand, fit_pattern


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")


def numbers(values: Iterable[int], width: int = 3, form: str = "{}.tar") -> list[str]:
    return [form.format(f"{value:0{width}}") for value in values]


def relative(patterns: str | list[str]) -> list[str]:
    return [os.path.relpath(path) for path in expand(patterns)]


def error_of(patterns: str | list[str]) -> str:
    with pytest.raises(ShardError) as caught:
        expand(patterns)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("s/{000..004}.tar", numbers(range(5), form="s/{}.tar")),
        ("s/<000..004>.tar", numbers(range(5), form="s/{}.tar")),
        ("./s/{000..002}.tar", numbers(range(3), form="s/{}.tar")),
        ("s/{002..000}.tar", numbers((2, 1, 0), form="s/{}.tar")),
        ("s/{000..004..2}.tar", numbers((0, 2, 4), form="s/{}.tar")),
        ("s/{003,001}.tar", ["s/003.tar", "s/001.tar"]),
        ("s/<003,001>.tar", ["s/003.tar", "s/001.tar"]),
        ("s/{{000..001},004}.tar", ["s/000.tar", "s/001.tar", "s/004.tar"]),
        ("{s,t}/{000..001}.tar", ["s/000.tar", "s/001.tar", "t/000.tar", "t/001.tar"]),
        ("s/00[13].tar", ["s/001.tar", "s/003.tar"]),
        ("s/*.tar", numbers(range(5), form="s/{}.tar")),
        ("s/*", numbers(range(5), form="s/{}.tar")),  # not the indexes, the dataset.json, the notes beside them
        ("*/000.tar", ["s/000.tar", "t/000.tar"]),
        ("{s,t}/00[01].tar", ["s/000.tar", "s/001.tar", "t/000.tar", "t/001.tar"]),
        ("s", numbers(range(5), form="s/{}.tar")),
        ("t/", ["t/000.tar", "t/001.tar", "t/a.tar.gz", "t/b.tgz"]),  # not what lies below
        ("t/**/*.tar", ["t/000.tar", "t/001.tar", "t/below/002.tar"]),
        ("s/000.tar::t/001.tar", ["s/000.tar", "t/001.tar"]),
        ("t/{000..001}.tar::s/00[34].tar", ["t/000.tar", "t/001.tar", "s/003.tar", "s/004.tar"]),
        (["s/002.tar", "s/000.tar", "t"], ["s/002.tar", "s/000.tar", "t/000.tar", "t/001.tar", "t/a.tar.gz", "t/b.tgz"]),
        ("s/lists/one.txt", ["s/001.tar", "s/003.tar", "s/004.tar", "t/000.tar"]),
        ("s/lists/*.txt", ["s/001.tar", "s/003.tar", "s/004.tar", "t/000.tar"]),
    ],
)
def test_patterns(folder: Path, pattern: str | list[str], expected: list[str]) -> None:
    touch(*numbers(range(5), form="s/{}.tar"), "s/000.tar.idx", "s/dataset.json", "s/README.txt", "s/._000.tar", "t/._000.tar")
    touch(*numbers(range(2), form="t/{}.tar"), "t/a.tar.gz", "t/b.tgz", "t/c.zip", "t/below/002.tar")
    lists = folder / "s" / "lists"
    lists.mkdir()
    (lists / "one.txt").write_text("\ufeff# shards\n../001.tar # one\n\n  ../{003..004}.tar\r\n../../t/000.tar\n", encoding="utf-8")
    assert relative(pattern) == expected


def test_paths_are_absolute_and_stay_as_named(folder: Path) -> None:
    touch("real/0.tar")
    os.symlink("real", "link")
    assert expand("link/../link/0.tar") == [str(folder / "link" / "0.tar")]
    assert expand(str(folder / "link")) == [str(folder / "link" / "0.tar")]


@pytest.mark.parametrize(
    "name", ["a b/0 1.tar", "100%/%20.tar", "a{1..3}.tar", "x[1].tar", "a::b.tar", "größe/<1>.tar", "{0.tar", "a#b.tar"]
)
def test_a_file_that_exists_wins_over_what_its_name_means(folder: Path, name: str) -> None:
    touch(name)
    assert relative(name) == relative("./" + name) == relative(str(folder / name)) == [name]
    assert relative("file:" + name) == relative(f"file://{folder}/{name}") == [name]
    Path("list.txt").write_text(name + "\n", encoding="utf-8")
    if "#" not in name:
        assert relative("list.txt") == [name]


def test_file_urls(folder: Path) -> None:
    touch(*numbers(range(3), form="a b/{}.tar"))
    expected = numbers(range(3), form="a b/{}.tar")
    for start in (f"file:{folder}/", f"file://{folder}/", f"file://localhost{folder}/", "file:"):
        assert relative(start + "a b/{000..002}.tar") == relative(start + "a%20b/<000..002>.tar") == expected
    assert "/a b/3.tar: no such file" in error_of(f"file://{folder}/a%20b/3.tar")


def test_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    touch("x/0.tar")
    assert relative("~/x/{0..0}.tar") == relative("~/x") == ["x/0.tar"]


def test_lists_may_name_lists(folder: Path) -> None:
    touch("a/0.tar", "b/1.tar")
    Path("a/list.txt").write_text("0.tar\n../b/list.txt")
    Path("b/list.txt").write_text("1.tar\n")
    assert relative("a/list.txt") == ["a/0.tar", "b/1.tar"]
    Path("b/list.txt").write_text("../a/list.txt\n")
    assert "a/list.txt: a list that names itself (" in error_of("a/list.txt")


def test_hole_in_a_range(folder: Path) -> None:
    touch(*numbers({*range(10)} - {3, 7}, form="s/{}.tar"))
    assert error_of("s/{000..009}.tar") == (
        "s/{000..009}.tar: 2 of its 10 shards are missing (003.tar, 007.tar); "
        "the pattern of those that are there is 's/{{000..002},{004..006},{008..009}}.tar'"
    )
    touch("s/003.tar", "s/007.tar")
    assert error_of("s/<000..099>.tar") == (
        "s/<000..099>.tar: 90 of its 100 shards are missing (010.tar, 011.tar, 012.tar, ...); "
        "the pattern of those that are there is 's/{000..009}.tar'"
    )
    assert "1 of its 11 shards is missing (010.tar)" in error_of("s/{000..010}.tar")
    assert error_of(["s/000.tar", "s/010.tar"]) == "s/010.tar: no such file; 's' holds 10 shards, named by 's/{000..009}.tar'"


def test_nothing_there(folder: Path) -> None:
    touch(*numbers(range(15), form="s/shard-{}.tar"), "pictures/cat/1.jpg", "split/train/0.tar", "split/val/0.tar")
    assert error_of("s/{00..14}.tar") == (
        "s/{00..14}.tar: none of its 15 shards is there; 's' holds 15 shards, named by 's/shard-{000..014}.tar'"
    )
    assert error_of("no/{00..14}.tar") == "no/{00..14}.tar: none of its 15 shards is there; there is no folder 'no'"
    assert error_of("s/x*.tar") == "s/x*.tar: no file matches; 's' holds 15 shards, named by 's/shard-{000..014}.tar'"
    assert error_of("no/*/x.tar") == "no/*/x.tar: no file matches; there is no folder 'no'"
    assert error_of("x.tar").startswith("x.tar: no such file; '.' holds no *.tar, but folders with some: ")
    assert error_of("split") == "'split' holds no *.tar, but folders with some: split/train, split/val"
    assert error_of("pictures") == "'pictures' holds no *.tar; scripts/make_shards.py makes shards of folders of pictures"
    Path("empty.txt").write_text("# nothing\n")
    assert error_of("empty.txt").endswith("empty.txt: this list names no shard: write one pattern a line, such as 'shards/{000..099}.tar'")
    Path("hole.txt").write_text("s/shard-{000..001}.tar\ns/shard-015.tar\n")
    assert error_of("hole.txt").startswith("s/shard-015.tar: no such file; ")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "an empty pattern: write one such as 'shards/{000..099}.tar'"),
        ("  ", "an empty pattern: write one such as 'shards/{000..099}.tar'"),
        ("a::", "an empty pattern"),
        ([], "no shards: a pattern is needed, such as 'shards/{000..099}.tar'"),
        ("s/{000..009.tar", "bad pattern: a brace is not closed or not opened; write ranges like 'shards/{000..099}.tar'"),
        ("s/{000.009}.tar", "bad pattern: '{000.009}' is no range; write ranges like 'shards/{000..099}.tar'"),
        ("s/{000...009}.tar", "bad pattern: '{000...009}' is no range"),
        ("s/{000-009}.tar", "bad pattern: '{000-009}' is no range"),
        ("s/<000:009>.tar", "bad pattern: '<000:009>' is no range"),
        ("s/{0..9999999999}.tar", "bad pattern: it names more than 1,000,000 shards"),
        ("s/{0..9999}{0..9999}.tar", "bad pattern: it names more than 1,000,000 shards"),
        ("https://host/{000..009.tar?sig=secret", "https://host/{000..009.tar: bad pattern: a brace is not closed or not opened"),
        ("https://h/{0..9999999999}.tar?sig=secret", "https://h/{0..9999999999}.tar: bad pattern: it names more than 1,000,000 shards"),
        ("https://host/shards/", "https://host/shards/: HTTP servers list no folders: name the shards, {000..099}.tar, or a .txt list"),
        ("nostore://u:secret@host/x.tar", "nostore://host/x.tar: fsspec knows no store named 'nostore'; there are http, https, s3"),
        ("zip://x.tar", "zip://x.tar: zip: is no store of shards; there are http, https, s3"),
        ("pipe:cat x.tar", "pipe:cat x.tar: commands are not run: copy what it writes to a disk, or give --stream and --allow-pipe"),
    ],
)
def test_bad_patterns(folder: Path, pattern: str, message: str) -> None:
    Path("a").write_bytes(b"")
    assert message in error_of(pattern)


def test_a_shard_is_named_once(folder: Path) -> None:
    touch(*numbers(range(3), form="s/{}.tar"))
    message = f"{folder}/s/001.tar: named twice; each shard may stand in the patterns once"
    for patterns in (["s/{000..001}.tar", "s/*.tar"], "s::s/../s/001.tar", "s/{001,001}.tar", ["s/001.tar", f"file:{folder}/s/001.tar"]):
        assert error_of(patterns).endswith(message) or "s/000.tar: named twice" in error_of(patterns)


@settings(max_examples=80, deadline=None)
@given(
    st.sets(
        st.tuples(
            st.sampled_from(["", "a-", "7/b_", "0/"]), st.integers(0, 1200), st.sampled_from([0, 3, 5]), st.sampled_from(["-", ".x.tar"])
        ),
        min_size=1,
        max_size=25,
    )
)
def test_the_fitting_pattern_names_just_those_shards(tmp_path_factory: pytest.TempPathFactory, parts: set) -> None:
    folder = tmp_path_factory.mktemp("fit")
    paths = sorted({f"{folder}/{before}{number:0{width}}{after}" for before, number, width, after in parts})
    touch(*paths)
    assert sorted(expand(fit_pattern(paths))) == paths


def test_fitting_patterns() -> None:
    assert fit_pattern(numbers(range(100))) == "{000..099}.tar"
    assert fit_pattern(numbers(range(12), 0)) == "{0..11}.tar"
    assert fit_pattern(numbers(range(8, 12), 2)) == "{08..11}.tar"
    assert fit_pattern(numbers([5])) == "005.tar"
    assert fit_pattern(["a/0.tar", "a/1.tar", "b/0.tar", "x.tar"]) == "x.tar::a/{0..1}.tar::b/0.tar"
    assert fit_pattern(numbers(range(3), form="v2/x-{}.tar.gz")) == "v2/x-{000..002}.tar.gz"
    assert fit_pattern(numbers(range(3), form="{}-of-003.tar")) == "{000..002}-of-003.tar"
