"""browser/: the pages of scripts/browse.py over HTTP; what a request may not do; any page of a large set comes at once."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tar_maker as tm
from flask.testing import FlaskClient
from PIL import Image

from browser import charts, run_pages
from browser.app import Site, create_app
from browser.contents import kind_of, show
from browser.library import ShardSet
from data.checking import Look, check_all
from data.shards import load_shards
from data.viewing import FieldView
from scripts import browse

ROOT = Path(__file__).resolve().parents[1]
EVIL = "<script>alert(1)</script>\"'&"


def png(seed: int, side: int = 16) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def write_set(folder: Path) -> Path:
    """Two shards of 100 pictures in 3 classes, one of them cut; and one of other things, two of them broken."""
    folder.mkdir(parents=True)
    for number in range(2):
        samples = [(f"k{100 * number + i:04d}", {"png": png(i), "cls": b"%d" % (i % 3)}) for i in range(100)]
        samples[7] = ("k0007x", {"png": png(7)[:-20], "cls": b"1"})
        (folder / f"{number}.tar").write_bytes(tm.join_samples(samples) + tm.END)
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    others = [
        (EVIL.replace("/", "_"), {"txt": EVIL.encode(), "html": b"<b onload=x>", "svg": b"<svg onload=alert(1)>", "bin": bytes(range(64))}),
        ("data", {"json": json.dumps({"a": [1, EVIL]}).encode(), "npy": array.getvalue(), "x.json": b"{no", "pickle.npy": b"\x93NUMPY"}),
        ("sound", {"wav": b"RIFF" + bytes(4000), "txt": b"words"}),
        ("clip", {"mp4": bytes(5000), "evil<img>": b"1"}),
    ]
    (folder / "2.tar").write_bytes(tm.join_samples(others) + tm.END)
    return folder


def write_runs(folder: Path, shards: Path) -> Path:
    """A finished run with bad samples, one that goes on, and a folder that is none."""
    for name, ended in ("first", True), (f"evil{EVIL.replace('/', '')}", False):
        run = folder / name
        run.mkdir(parents=True)
        start = {"event": "start", "model": "tiny", "num_samples": 204, "total_steps": 40, "batch_size": 8, "world_size": 2}
        lines: list[dict[str, Any]] = [start]
        for step in range(1, 31):
            line = {"event": "train", "epoch": 0, "step": step, "loss": 2 / step, "lr": 0.1, "samples_per_second": 100.0}
            lines.append({**line, "data_time": 0.01, "step_time": 0.1})
        lines.append({"event": "epoch", "step": 30, "top1": 0.5, "loss": 1.0, "limits": f"GPUs wait {EVIL}"})
        lines.append({"event": "eval", "step": 30, "top1": 0.4567, "loss": 1.1, "num_samples": 5})
        lines += [{"event": "end", "status": "finished", "steps": 30, "samples_seen": 240}] if ended else []
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
        rows = [f"{path}\t{100}\t{path.stat().st_size}\n" for path in sorted(shards.glob("?.tar"))]
        (run / "shards.tsv").write_text("path\tsamples\tbytes\n" + "".join(rows))
        bad = {"shard": "1.tar", "index": 7, "key": "k0007x", "field": "png", "reason": f"cut {EVIL}", "step": 3}
        records = [bad, {**bad, "step": 30}, {**bad, "index": 8}]
        (run / "bad_samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (run / "log.txt").write_text(f"line one\n{EVIL}\n")
    (folder / "other").mkdir()
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    base = tmp_path_factory.mktemp("browse")
    folder = write_set(base / "set")
    shards = load_shards(str(folder))
    draw = browse.create_draw("image-classification", "cls", 24, 5)
    site = Site(ShardSet(shards, ("ant", "bee", f"c{EVIL}")), write_runs(base / "runs", folder), draw)
    assert site.given is not None
    look = Look(decode=True, contents=False, keep=True)
    site.given.follow(check_all([shard.path for shard in shards], look, num_workers=1, progress=False))
    return site


@pytest.fixture
def client(site: Site) -> FlaskClient:
    return create_app(site).test_client()


def get(client: FlaskClient, url: str, status: int = 200) -> str:
    answer = client.get(url, base_url="http://127.0.0.1:8765")
    assert answer.status_code == status, answer.text
    return answer.text


class Page(HTMLParser):
    """The links, sources, and elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def all(self, tag: str, name: str) -> list[str]:
        return [attrs[name] for found, attrs in self.tags if found == tag and name in attrs]


def test_the_overview(client: FlaskClient) -> None:
    html = get(client, "/")
    assert "<b>204</b> samples" in html and "<b>3</b> shards" in html and '<b class="wrong">4</b> broken' in html
    assert html.count('class="state good"') == 0 and html.count('class="state bad"') == 3
    assert "bad samples: 1 bad sample, the first is 0.tar sample 7 (k0007x): png: PNG is cut" in html
    assert ">ant</a></th><td class=\"n\">67</td>" in html or ">ant</a>" in html
    assert get(client, "/health") in html


def test_the_grid(client: FlaskClient) -> None:
    page = Page(get(client, "/samples?size=24&page=2"))
    thumbs = [url for url in page.all("img", "src") if "thumb" in url]
    assert thumbs == [f"/thumb/{number}" for number in range(24, 48)]
    assert page.all("img", "alt")[0] == "k0024, ant"
    assert [url for url in page.all("a", "href") if "page=" in url] == ["/samples?page=1&size=24", "/samples?page=3&size=24"] * 2
    last = get(client, "/samples?page=999999")
    assert 'value="4"' in last and "words" in last and "<audio" in last and "<video" in last


def test_filters_and_search(client: FlaskClient) -> None:
    def numbers(query: str) -> list[int]:
        tags = Page(get(client, f"/samples?size=120&{query}")).tags
        return [int(attrs["href"].rpartition("/")[2]) for tag, attrs in tags if tag == "a" and attrs.get("class") == "name"]

    assert numbers("broken=1") == [7, 107, 201, 203]
    assert numbers("label=2") == [number for base in (0, 100) for number in range(base, base + 100) if (number - base) % 3 == 2]
    assert numbers("q=k0007x") == [7, 107] and numbers("q=k019") == list(range(190, 200)) and numbers("q=nothing") == []
    assert numbers("q=12") == [12, 112, *range(120, 130)] and numbers("q=203") == [203]  # a number that no key has
    assert numbers("q=k0007x&broken=1") == [7, 107] and numbers("shard=2") == [200, 201, 202, 203]
    get(client, "/samples?shard=3", 404)
    assert numbers("label=nothing") == []


def test_a_sample_in_full(client: FlaskClient, site: Site) -> None:
    html = get(client, "/sample/105")
    assert "Sample 105 of 204" in html and "Sample 5 of" in html and ">1.tar</a>" in html
    assert '<a rel="prev" href="/sample/104">' in html and '<a rel="next" href="/sample/106">' in html
    assert site.given is not None
    view = site.given.view(105)
    assert f"{view.fields[0].offset:,}" in html and f"from byte {view.offset:,} on" in html
    assert html.count('src="/drawn/105/') == 8
    assert "Broken: png: PNG is cut" in get(client, "/sample/107")
    assert "There is no sample 204: they are numbered 0 to 203." in get(client, "/sample/204", 404)
    text = get(client, "/sample/201")
    assert "int64 2 x 3\nfrom 0 to 5, mean 2.5" in text and "not JSON" in text and "not a .npy array" in text


def test_pictures_are_drawn_anew(client: FlaskClient, site: Site) -> None:
    answer = client.get("/thumb/5", base_url="http://localhost")
    image = Image.open(io.BytesIO(answer.data))
    assert answer.mimetype == "image/png" and image.size == (192, 192)
    assert client.get("/thumb/7", base_url="http://localhost").status_code == 415
    assert client.get("/thumb/200", base_url="http://localhost").status_code == 404
    original = client.get("/field/5/png?raw=1", base_url="http://localhost")
    assert original.data == png(5) and original.mimetype == "application/octet-stream"
    assert original.headers["Content-Disposition"] == "attachment; filename=sample-5.bin"
    drawn = client.get("/drawn/5/2", base_url="http://localhost")
    again = client.get("/drawn/5/2", base_url="http://localhost")
    other = client.get("/drawn/5/3", base_url="http://localhost")
    assert drawn.data == again.data != other.data and Image.open(io.BytesIO(drawn.data)).size == (192, 192)


def test_nothing_from_a_tar_becomes_a_page(client: FlaskClient) -> None:
    urls = ["/", "/samples?page=4", "/sample/200", "/sample/201", "/sample/203", "/runs", "/run/first", "/sample/7?run=first"]
    for url in [*urls, f"/samples?q={EVIL}"]:
        html = client.get(url, base_url="http://localhost").text
        page = Page(html)
        assert "alert(1)</script>" not in html and not page.all("script", "onload")
        assert page.all("script", "src") == ["/static/page.js"] and html.count("<script") == 1, url
        assert not [tag for tag, attrs in page.tags if any(name.startswith("on") or name == "style" for name in attrs)], url
        targets = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "action")]
        assert [value for value in targets if not value.startswith(("/", "#"))] == [], url
    for field in ("html", "svg", "txt", "bin"):
        answer = client.get(f"/field/200/{field}", base_url="http://localhost")
        assert answer.mimetype == "application/octet-stream" and "attachment" in answer.headers["Content-Disposition"]
    assert client.get("/field/203/mp4", base_url="http://localhost").mimetype == "video/mp4"
    part = client.get("/field/203/mp4", base_url="http://localhost", headers={"Range": "bytes=10-19"})
    assert (part.status_code, len(part.data)) == (206, 10)


def test_only_this_machine_may_ask(client: FlaskClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8765", "127.0.0.1@evil.example", ""):
        assert client.get("/", base_url="http://127.0.0.1", headers={"Host": host}).status_code in (400, 421), host
    for host in ("127.0.0.1", "localhost:8765", "[::1]:8765"):
        assert client.get("/", base_url="http://127.0.0.1", headers={"Host": host}).status_code == 200, host
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.open("/samples", method=method, base_url="http://localhost").status_code == 405
    others = ["/static/../app.py", "/static/%2e%2e/app.py", "/field/0/..%2f..%2fetc%2fpasswd"]
    for url in [*others, "/run/..", "/run/other", "/run/..%2fset", "/run/../live"]:
        assert client.get(url, base_url="http://localhost").status_code == 404, url
    headers = client.get("/sample/1", base_url="http://localhost").headers
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_runs(client: FlaskClient) -> None:
    html = get(client, "/runs")
    assert ">first</a>" in html and "45.67 %" in html and "other" not in html
    page = get(client, "/run/first")
    assert "finished" in page and "data-done" in page and "step <b>30</b> of 40" in page and page.count("<svg viewBox") == 5 + 1
    assert 'aria-label="Loss: training from 2 to 0.06667, validation from 1.1 to 1.1"' in page and "Bad samples <small>2</small>" in page
    assert 'class="limits"' in page
    link = next(url for url in Page(page).all("a", "href") if url.startswith("/find"))
    answer = client.get(link, base_url="http://localhost")
    assert answer.status_code == 302 and answer.headers["Location"] == "/sample/107?run=first"
    sample = get(client, "/sample/107?run=first")
    assert "k0007x" in sample and "/thumb/107?run=first" in sample or "/field/107/png?run=first" in sample
    gone = [url for url in Page(page).all("a", "href") if url.startswith("/find")][1]
    assert "This sample is not there any more" in get(client, gone, 404)
    name = next(url for url in Page(html).all("a", "href") if "evil" in url)
    assert "data-done" not in get(client, name)
    assert "data-done" not in get(client, name + "/live")


@pytest.mark.parametrize(
    "content",
    [
        b'{"event":"start"}\n{"event":"train","loss":1}\n{"event":"train","step":"x","loss":2,"data_time":1,"step_time":"y"}\n',
        b'{"event":"train","step":1,"loss":NaN,"step_time":1,"data_time":Infinity}\n{"event":"train","step":1e400,"loss":1}\n',
        b'{"event":"train","step":2,"step_time":1}\n{"event":"epoch","step":null,"limits":["<script>alert(1)</script>"]}\n',
        b'{"event":"start","num_samples":"many","total_steps":[1],"world_size":"<b>","model":{}}\n{"event":"eval","step":1,"top1":"x"}\n',
        b'{"event":"start","num_samples":null}\n{"event":"end","status":["<script>alert(1)</script>"]}\n',
        b"\xff\xfe\0\n[1]\n" + b"[" * 100_000 + b"\n",
    ],
)
def test_a_run_whose_log_is_broken(tmp_path: Path, content: bytes) -> None:
    """What can't be shown is passed over; the page is there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content)
    bad = b'{"shard":1,"index":"x"}\n{"shard":"<b>","index":1e300,"key":"<script>alert(1)</script>","reason":5}\n{"index":[1]}\n'
    (tmp_path / "run" / "bad_samples.jsonl").write_bytes(bad)
    client = create_app(Site(runs=tmp_path)).test_client()
    for path in ("/runs", "/run/run", "/run/run/live"):
        answer = client.get(path)
        assert answer.status_code == 200 and "<script>alert" not in answer.text
    assert "Bad samples <small>3</small>" in client.get("/run/run").text


@pytest.mark.parametrize("number", ["²", "٣", "-1", "1e3", "9" * 40])
def test_numbers_that_are_none(client: FlaskClient, number: str) -> None:
    for path in (f"/samples?page={number}", f"/samples?q={number}", f"/samples?shard={number}", f"/find?shard=1.tar&index={number}"):
        assert client.get(path).status_code in (200, 302, 404)


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    client = create_app(Site(ShardSet(load_shards(str(folder))))).test_client()
    (folder / "0.tar").unlink()
    assert "can&#39;t be read: No such file" in get(client, "/samples")
    assert "can&#39;t be read: No such file" in get(client, "/sample/0", 410)
    assert "k0101" in get(client, "/sample/101")
    assert "Start browse.py with --runs FOLDER" in get(client, "/runs", 404)


def test_a_search_finds_each_line_once() -> None:
    from browser.library import _search

    keys = b"aa\nab\nba\naa"
    assert _search(keys, b"a", 10) == [0, 1, 2, 3] and _search(keys, b"a", 2) == [0, 1]
    assert _search(keys, b"aa", 10) == [0, 3] and _search(keys, b"", 10) == [] and _search(b"", b"a", 10) == []


def test_charts() -> None:
    assert charts.nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0]
    assert charts.line_chart("loss", {"training": [(22, 1.0)]}).count("step 22") == 1
    assert charts.line_chart("loss", {"training": [(1, 1.0), (22, 1.0)]}).count(">step ") == 2
    assert charts.nice_ticks(3, 3)[0] < 3 < charts.nice_ticks(3, 3)[-1]
    assert charts.nice_ticks(0.02, 97) == [0, 25, 50, 75, 100]
    assert len(charts.thin([(i, i) for i in range(10_000)])) == charts.MAX_POINTS
    assert charts.thin([(i, i) for i in range(10_000)])[-1] == (9999, 9999)
    assert charts.line_chart("x", {"a": []}) == "" and charts.line_chart("x", {"a": [(1, float("nan"))]}) == ""
    assert "&lt;b&gt;" in charts.line_chart("<b>", {"<b>": [(1, 2)]}) and "<b></b>" not in charts.line_chart("<b>", {"a": [(1, 2)]})


def test_contents() -> None:
    assert show(FieldView("seg.json", 0, 2), b"{}").text == "{}"
    long = show(FieldView("txt", 0, 0), b"x" * 100_000)
    assert len(long.text) == 65_536 and long.cut
    assert show(FieldView("bin", 0, 0), b"ab\0").text == "0000  61 62 00" + " " * 41 + "ab."
    kinds = {"a.png": "picture", "mp4": "video", "flac": "audio", "json": "text", "exe": "bytes"}
    assert {name: kind_of(FieldView(name, 0, 0)) for name in kinds} == kinds


def test_a_run_that_goes_on_is_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lines = [{"event": "start"}, {"event": "end", "status": "stopped"}, {"event": "start", "model": "x"}, {"event": "train", "step": 3}]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_pages.read_run(tmp_path, "a")
    assert run is not None and (run.state, run.step, run.best, run.start["model"]) == ("open", 3, None, "x")
    assert run_pages.read_run(tmp_path, "../a") is None


@pytest.fixture
def server(site: Site, tmp_path: Path) -> Iterator[int]:
    assert site.given is not None
    folder = str(Path(site.given.shards[0].path).parent)
    made = browse.start(
        patterns=[folder], runs=site.runs, port=0, task="image-classification", label="cls", img_size=24, seed=0, decode=True, workers=1
    )
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made.port
    made.shutdown()
    made.server_close()
    thread.join()


def test_over_a_socket(server: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server, timeout=30)
    for _ in range(100):
        connection.request("GET", "/health")
        text = connection.getresponse().read().decode()
        if "data-done" in text:
            break
        time.sleep(0.05)
    assert '<b class="wrong">4</b> broken' in text
    connection.request("GET", "/samples?broken=1")  # the same connection: keep-alive
    assert b"k0007x" in connection.getresponse().read()
    connection.request("GET", "/", headers={"Host": "rebound.example"})
    assert connection.getresponse().status == 421
    connection.close()


def test_mistakes_are_one_line(tmp_path: Path, server: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set")
    for argv, message in (
        ([], "give a pattern that names shards, or --runs FOLDER"),
        ([str(tmp_path / "no")], "no such file; "),
        (["--runs", str(tmp_path / "no")], "no such folder; run.py makes runs/"),
        ([str(folder), "--label", "x"], "label source 'x' is not one of"),
        ([str(folder), "--task", "no"], "task 'no' is unknown; there are image-classification"),
    ):
        capsys.readouterr()
        assert browse.main([*argv, "--port", "0"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("browse.py: error: ") and err.count("\n") == 1 and message in err
    with pytest.raises(SystemExit):
        browse.main([str(folder), "--port", "99999"])
    assert capsys.readouterr().err == "browse.py: error: argument --port: '99999' is not a whole number from 0 to 65535\n"
    command = [sys.executable, str(ROOT / "scripts/browse.py")]
    done = subprocess.run([*command, str(folder), "--port", str(server)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"browse.py: error: port {server}: ")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert "examples:\n  python scripts/browse.py 'shards/{000..099}.tar'" in done.stdout


@pytest.mark.full
def test_any_page_of_a_million_samples_comes_at_once(tmp_path: Path) -> None:
    """Page 10,000 in under 200 ms of the server's time, while nothing has been checked, and after."""
    path = tmp_path / "0.tar"
    with open(path, "wb") as file:
        for start in range(0, 1_000_000, 10_000):
            file.write(b"".join(tm.header(b"k%07d.txt" % i) for i in range(start, start + 10_000)))
        file.write(tm.END)
    shards = load_shards(str(path))
    given = ShardSet(shards)
    client = create_app(Site(given)).test_client()

    def timed(url: str) -> float:
        answer = client.get(url, base_url="http://localhost")
        assert answer.status_code == 200
        return float(answer.headers["Server-Timing"].removeprefix("total;dur="))

    timed("/samples")
    assert "k0599940" in get(client, "/samples?page=10000") and timed("/samples?page=10000") < 200
    assert timed("/samples?size=120&page=8000") < 200 and timed("/sample/999999") < 200
    given.follow(check_all([str(path)], Look(contents=False, keep=True), num_workers=1, progress=False))
    assert timed("/samples?page=10000") < 200 and timed("/") < 500
    assert "k0765432" in get(client, "/samples?q=0765432") and timed("/samples?q=0765432") < 500
