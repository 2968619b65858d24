"""data/urls.py: what of a URL is shown, and what stays secret."""

from __future__ import annotations

import pytest

from data.urls import base_name, folder_of, is_url, parent_of, redact, redact_pattern, relative_names, scrub, sibling, with_suffix


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/{000..099}.tar", "https://host/a/{000..099}.tar"),
        ("https://user:secret@host:8080/a.tar?X-Amz-Signature=secret#secret", "https://host:8080/a.tar"),
        ("https://secret@host/a.tar", "https://host/a.tar"),
        ("https://host?sig=secret", "https://host"),
        ("https://user:se@cret@host/a.tar", "https://host/a.tar"),
        ("s3://bucket/a.tar?versionId=secret", "s3://bucket/a.tar"),
        ("s3://key:secret@bucket/a.tar", "s3://bucket/a.tar"),
        ("abfs://container@account.dfs.core.windows.net/a.tar", "abfs://container@account.dfs.core.windows.net/a.tar"),
        ("hf://datasets/a/b@main/x.tar", "hf://datasets/a/b@main/x.tar"),
        ("/a/what?.tar", "/a/what?.tar"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert "secret" not in scrub(f"403, message='Forbidden', url='{url}'\n(or {url})")


def test_patterns_and_lists_are_redacted_part_by_part() -> None:
    assert redact_pattern("https://h/a.tar?s=x::s3://b/c.tar?s=x") == "https://h/a.tar::s3://b/c.tar"
    assert redact_pattern(["https://h/a.tar?s=x", "a?.tar"]) == ["https://h/a.tar", "a?.tar"]
    assert redact_pattern(None) is None


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://b/x", "HTTPS://h/x")))
    assert not any(map(is_url, ("file:///x", "/x", "a:b", "x.tar")))


def test_neighbours_keep_the_signature() -> None:
    url = "https://host/a/b/0.tar?sig=1"
    assert with_suffix(url, ".idx") == "https://host/a/b/0.tar.idx?sig=1"
    assert sibling(url, "dataset.json") == "https://host/a/b/dataset.json?sig=1"
    assert sibling(parent_of(url), "dataset.json") == "https://host/a/dataset.json?sig=1"
    assert sibling(url, "../c/1.tar") == sibling(url, "../../../a/c/1.tar") == "https://host/a/c/1.tar?sig=1"
    assert sibling("s3://bucket/0.tar", "1.tar") == "s3://bucket/1.tar"
    assert (base_name(url), folder_of(url)) == ("0.tar", "https://host/a/b")


def test_names_are_relative_to_the_common_folder_wherever_that_is() -> None:
    for start in ("/data/x", "s3://bucket/x", "https://host"):
        assert relative_names([f"{start}/a/0.tar", f"{start}/b/0.tar"]) == ["a/0.tar", "b/0.tar"]
        assert relative_names([f"{start}/0.tar"]) == ["0.tar"]
    assert relative_names(["/data/0.tar", "s3://data/0.tar"]) == ["/data/0.tar", "s3:/data/0.tar"]
