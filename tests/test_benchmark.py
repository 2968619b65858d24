"""scripts/benchmark.py: four rates and a sentence; benchmarks/: what the comparison measures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from remote_shards import nginx, published, site  # noqa: F401

from scripts.benchmark import Rates, main, verdict

ROOT = Path(__file__).resolve().parents[1]


def test_rates_of_some_shards(picture_shards, capsys):
    paths = picture_shards([40, 30])
    words = ["--data", *paths, "--model", "tiny", "--device", "cpu", "-b", "8", "-j", "1", "--seconds", "0.05"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"reading, one process +[\d,]+ samples/s, [\d,]+ MB/s", lines[0])
    assert re.fullmatch(r"reading and decoding, one process +[\d,]+ samples/s", lines[1])
    assert re.fullmatch(r"the loader, 1 workers +[\d,]+ samples/s", lines[2])
    assert re.fullmatch(r"tiny alone on cpu, 32 x 32 +[\d,]+ samples/s", lines[3])
    assert lines[5].endswith(".") and ("limits this run" in lines[5] or "as fast as" in lines[5])


def test_rates_of_remote_shards(site, published, capsys):
    published([40, 30])
    assert main(["--data", site.shards(2), "--model", "tiny", "--device", "cpu", "-b", "8", "-j", "1", "--seconds", "0.05"]) == 0
    assert "the loader, 1 workers" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    (["--data", "nowhere.tar"], "benchmark.py: nowhere.tar: no such file"),
    (["--data", "{train}", "--model", "nonesuch"], "nonesuch"),
])  # fmt: skip
def test_a_mistake_is_one_line(picture_shards, capsys, words, said):
    path = picture_shards([8])[0]
    assert main([word.format(train=path) for word in words] + ["-j", "0", "-b", "4", "--seconds", "0"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("rates, workers, cores, absent, said", [
    (Rates(9000, 900, 500, 2000, 400), 4, 8, "", "The model limits this run: the loader gives 5.0 times what it takes; -j 1 would do."),
    (Rates(9000, 900, 500, 500, 400), 1, 8, "", "The model limits this run: the loader gives 1.2 times what it takes."),
    (Rates(600, 60, 500, 900, 4000), 2, 8, "", "The disk limits this run (the model takes 4,000 samples/s and gets 900): put"),
    (Rates(9000, 900, 500, 1000, 4000), 2, 8, "", "the model takes 4,000 samples/s and gets 1,000): more workers (-j 4)."),
    (Rates(9000, 900, 200, 400, 4000), 2, 2, "not built", "use the native decoder (not built)."),
    (Rates(9000, 900, 500, 1000, 1100), 2, 2, "", "Loader and model are as fast as each other"),
    (Rates(9000, 900, 500, 1000, 4000), 2, 2, "", "and all 2 cores are used: make decoding cheaper (make_shards.py --resize 256,"),
])  # fmt: skip
def test_the_sentence(rates, workers, cores, absent, said):
    assert said in verdict(rates, workers, cores, absent)


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__("measure")
    for name in ("measure", "peers", "peers_small", "inputs", "loaders"):
        sys.modules.pop(name, None)


def test_one_loader_is_measured(measure, tmp_path, monkeypatch):
    import inputs

    monkeypatch.setattr(inputs.small_shards, "__defaults__", (1000, 500))
    assert len(inputs.small_shards(tmp_path)) == 2
    for name in ("webdataset", "shardline"):
        found = measure.measure(name, "small", tmp_path, 0, 0.05)
        assert found["rate"] > 0 and found["per_cpu"] > 0 and found["first"] > 0 and found["memory"] > 10_000_000
    import loaders

    rows = [{"name": name, "kind": "small", "workers": 0, "rate": rate, "per_cpu": 2 * rate, "first": 0.5, "memory": 2e6} for name, rate in
            (("webdataset", 10.0), ("shardline", 300.0), ("shardline", 100.0), ("shardline", 200.0))]  # fmt: skip
    assert loaders.table(rows).splitlines()[2:] == [
        "| 0 | shardline | 200 (100-300) | 20.0 | 400 | 20.0 | 0.50 s | 2 MB |",
        "| 0 | webdataset | 10 (10-10) | 1.0 | 20 | 1.0 | 0.50 s | 2 MB |",
    ]


def test_drawn_pictures_are_like_photographs(measure):
    import inputs
    from PIL import Image

    data = [inputs.draw_picture(number) for number in range(4)]
    assert data[0] == inputs.draw_picture(0)
    assert 50_000 < sum(map(len, data)) / 4 < 200_000
    assert Image.open(__import__("io").BytesIO(data[0])).size == (500, 375)
