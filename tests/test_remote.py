"""data/remote.py and data/retrying.py: bytes over HTTP from nginx, with and without faults on the way."""

from __future__ import annotations

import sys

import pytest
import servers
from remote_shards import Site, nginx, site  # noqa: F401

from data import remote, retrying
from data.errors import ShardError

CONTENT = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE", 0.05)


def error_of(work, *args):
    with pytest.raises(ShardError) as caught:
        work(*args)
    message = str(caught.value)
    assert "secret" not in message and "\n" not in message and "Traceback" not in message
    return message


def test_sizes_tags_ranges_and_whole_files(site: Site) -> None:
    (site.folder / "x").write_bytes(CONTENT)
    (site.folder / "empty").write_bytes(b"")
    found = remote.stat(f"{site.url}/x?sig=secret")
    assert (found.size, found.ranges, found.start) == (len(CONTENT), True, CONTENT[:512]) and found.tag
    assert remote.stat(f"{site.url}/empty").size == 0
    assert remote.read(f"{site.url}/x", 1000, 70_001, found.tag) == CONTENT[1000:70_001]
    assert remote.read_whole(f"{site.url}/x") == CONTENT == b"".join(remote.stream(f"{site.url}/x"))
    assert remote.read_whole(f"{site.url}/none") is None and remote.read_whole(f"{site.url}/empty") == b""


def test_what_is_not_there_or_forbidden_is_said_without_secrets(site: Site) -> None:
    url = site.url.replace("http://", "http://user:secret@")
    assert error_of(remote.stat, f"{url}/x.tar?sig=secret") == f"{site.url}/x.tar: not there (404): check the name"
    forbidden = f"{site.server.url}/forbidden/x.tar"
    message = error_of(remote.stat, f"{forbidden}?sig=secret")
    assert message.startswith(f"{forbidden}: access denied (403): check the name, and the credentials")
    message = error_of(remote.stat, f"http://user:secret@127.0.0.1:{servers.free_port()}/x.tar?sig=secret")
    assert "x.tar: can't be read: ClientConnectorError: " in message and "(4 tries in " in message


def test_a_file_that_changes_is_noticed(site: Site) -> None:
    path, url = site.folder / "x.tar", f"{site.url}/x.tar"
    path.write_bytes(CONTENT)
    tag = remote.stat(url).tag
    path.write_bytes(CONTENT[::-1] + b"!")
    message = f"{url}: it changed on the server since its index was read: start again, and don't write to the shards of a running job"
    assert error_of(remote.read, url, 0, 10, tag) == message
    path.write_bytes(b"short")
    assert error_of(remote.read, url, 1000, 1010, "") == message


@pytest.mark.parametrize("kind", ["503", "429", "reset", "cut", "short", "stall"])
def test_what_may_pass_is_tried_again(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL", 0.3)
    monkeypatch.setattr(remote, "_stores", {})
    (site.folder / "x.tar").write_bytes(CONTENT)
    with servers.faulty(site.server.url, lambda path, number: kind if number in (1, 2, 4) else "") as proxy:
        url = site.url.replace(site.server.url, proxy.url) + "/x.tar?sig=secret"
        found = remote.stat(url)
        assert found.size == len(CONTENT)
        assert remote.read(url, 5, 90_000, found.tag) == CONTENT[5:90_000]
        assert proxy.count[kind] == 3


def test_a_server_that_only_fails_is_given_up(site: Site) -> None:
    with servers.faulty(site.server.url, lambda path, number: "503") as proxy:
        url = site.url.replace(site.server.url, proxy.url) + "/x.tar"
        message = error_of(remote.read, f"{url}?sig=secret", 0, 10)
        assert message.startswith(f"{url}: can't be read: ClientResponseError: 503, message='Service Unavailable', url='{url}' (9 tries")
        assert proxy.count["503"] == retrying.ATTEMPTS


def test_errors_of_the_code_are_not_tried_again() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        retrying.retried("http://host/x", work)
    assert len(calls) == 1


@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("hf://datasets/a/b/x", "huggingface_hub")])
def test_a_missing_package_is_named_with_what_installs_it(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what an import of a package that isn't there meets
    monkeypatch.setattr(remote, "_stores", {})
    assert error_of(remote.stat, url) == (
        f"{url}: needs a package that is missing: pip install fsspec {package} (or all stores: pip install -r requirements-remote.txt)"
    )


def test_nothing_is_written_to_http(site: Site, tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    assert error_of(remote.upload, str(tmp_path / "x"), f"{site.url}/x").startswith(f"{site.url}/x: HTTP servers are only read from")
