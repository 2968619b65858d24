"""data/streaming.py: shards read from end to end, dealt to ranks and workers, by count."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import servers
from commands import ROOT
from launching import base, global_batches, launch, read_lines
from remote_shards import nginx, published, site  # noqa: F401

from data import ShardError, build_loader, retrying, streaming
from data.labels import LabelMap
from data.streaming import ReadStream, check_readers, check_sources, read_shard, stand_in, stream_sources


def read(sources, epoch_samples, world_size=1, num_workers=0, epochs=1, batch_size=12, buffer=20, seed=0):
    """[rank][step] -> ids."""
    ranks = []
    for rank in range(world_size):
        loader = build_loader(
            [stand_in("x", epoch_samples)], batch_size=batch_size, img_size=32, labels=LabelMap("cls", 3), epochs=epochs, rank=rank,
            world_size=world_size, num_workers=num_workers, seed=seed, reader=ReadStream(tuple(sources), seed, buffer=buffer),
        )  # fmt: skip
        ranks.append([[i for i, valid in zip(b["ids"], b["valid"].tolist(), strict=True) if valid] for b in loader])
    return ranks


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_shards_are_dealt_without_overlap_and_steps_are_equal(picture_shards, world_size, num_workers) -> None:
    paths = picture_shards([30] * 8)
    ranks = read(stream_sources(paths), 120, world_size, num_workers)
    assert {len(steps) for steps in ranks} == {10} and all(len(ids) == 12 // world_size for steps in ranks for ids in steps)
    readers = [{i[0] for ids in steps[w :: max(1, num_workers)] for i in ids} for steps in ranks for w in range(max(1, num_workers))]
    assert sum(map(len, readers)) == len(set().union(*readers))  # in the first pass no shard is read twice
    seen = Counter(i for steps in ranks for ids in steps for i in ids)
    assert len(seen) == seen.total() == 120


def test_the_order_is_shuffled_and_that_of_the_seed(picture_shards) -> None:
    paths = picture_shards([30] * 4)
    first = read(paths, 120)
    assert first == read(paths, 120) != read(paths, 120, seed=1)
    shards = [i[0] for ids in first[0][:3] for i in ids]
    assert [i[1] for ids in first[0][:3] for i in ids] != sorted(i[1] for ids in first[0][:3] for i in ids) and len(set(shards)) > 1


def test_uneven_shards_stop_no_rank(picture_shards) -> None:
    ranks = read(picture_shards([100, 1, 2, 3]), 120, world_size=2, epochs=2)
    assert [len(steps) for steps in ranks] == [20, 20]


def test_compressed_tars_over_http(site, published, monkeypatch) -> None:
    paths = published([20, 20], indexed=False)
    for path in paths:
        (site.folder / (os.path.basename(path) + ".gz")).write_bytes(gzip.compress(Path(path).read_bytes()))
    names = stream_sources(f"{site.url}/{{000..001}}.tar.gz?sig=secret")
    samples = [sample for name in names for sample in read_shard(name)]
    assert [sample["__key__"] for sample in samples] == [f"s{i:05d}" for i in range(40)]
    assert {sample["__url__"] for sample in samples} == {f"{site.url}/000.tar.gz", f"{site.url}/001.tar.gz"}
    assert [i[0] for i in sum(sum(read(names, 24), []), [])].count("000.tar.gz") > 0


def quick(monkeypatch) -> None:
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE", 0.05)


def test_faults_cost_a_stream_no_sample(site, published, monkeypatch, capfd) -> None:
    """One request in ten fails, one in twenty is cut: the range is asked for again, not the shard."""
    published([40] * 3, indexed=False)
    quick(monkeypatch)
    monkeypatch.setattr(streaming, "CHUNK", 5_000)
    with servers.faulty(site.server.url, servers.drawn({"503": 0.05, "reset": 0.05, "cut": 0.05})) as proxy:
        url = site.shards(3).replace(site.server.url, proxy.url)
        check_sources(stream_sources(url))
        keys = [sample["__key__"] for source in stream_sources(url) for sample in read_shard(source)]
        assert keys == [f"s{i:05d}" for i in range(120)] and min(proxy.count[kind] for kind in ("503", "reset", "cut")) > 0
    assert capfd.readouterr().err == ""
    with pytest.raises(ShardError, match=f"{site.url}/003.tar: not there .404.: check the name"):
        check_sources(stream_sources(site.shards(5) + "?sig=secret"))


def test_a_shard_that_breaks_off_is_told_and_passed_over(site, published, monkeypatch, capfd) -> None:
    published([40, 40], indexed=False)
    quick(monkeypatch)
    with servers.faulty(site.server.url, lambda path, number: "cut" if "000.tar" in path else "") as proxy:
        url = proxy.url + site.url.removeprefix(site.server.url)
        (steps,) = read([f"{url}/000.tar?sig=secret", f"{url}/001.tar"], 120)
        err = capfd.readouterr().err
        assert len(steps) == 10 and f"warning: {url}/000.tar: " in err and "secret" not in err
        proxy.fault = lambda path, number: "503"
        with pytest.raises(ShardError, match=f"{url}/00.\\.tar: can't be read: .*503"):
            read([f"{url}/000.tar"], 12)


def test_commands_run_only_where_they_are_allowed(picture_shards, tmp_path) -> None:
    folder = os.path.dirname(picture_shards([20, 20])[0])
    pattern = f"pipe:cat {folder}/{{000..001}}.tar"
    with pytest.raises(ShardError, match="commands are not run"):
        stream_sources(pattern)
    sources = stream_sources(pattern, allow_pipe=True)
    assert sources == [f"pipe:cat {folder}/000.tar", f"pipe:cat {folder}/001.tar"]
    (steps,) = read(sources, 24, num_workers=1)
    assert len(steps) == 2
    signed = f"pipe:cat {folder}/000.tar # https://user:secret@host/000.tar?sig=secret"
    assert {sample["__url__"] for sample in read_shard(signed)} == {f"pipe:cat {folder}/000.tar # https://host/000.tar"}
    assert "secret" not in repr(stand_in([signed], 5))
    with pytest.raises(ShardError, match="pipe:exit 3: the command ended with 3"):
        list(read_shard("pipe:exit 3"))
    with pytest.raises(ShardError, match="the command ended with 1"):
        list(read_shard(f"pipe:cat {folder}/000.tar; exit 1"))
    (tmp_path / "list.txt").write_text(pattern + "\n")  # what a list says is not what the user typed
    with pytest.raises(ShardError, match="commands are not run"):
        stream_sources(str(tmp_path / "list.txt"), allow_pipe=True)
    assert not subprocess.run(["pgrep", "-f", f"cat {folder}"], capture_output=True).stdout


def test_joined_archives_are_read_to_their_end(picture_shards, tmp_path) -> None:
    paths = [Path(path) for path in picture_shards([20, 0, 20])]
    keys = [f"s{i:05d}" for i in range(40)]
    (tmp_path / "two.tar").write_bytes(b"".join(path.read_bytes() for path in paths))
    (tmp_path / "two.tar.gz").write_bytes(b"".join(gzip.compress(path.read_bytes()) for path in paths))
    for source in (str(tmp_path / "two.tar"), str(tmp_path / "two.tar.gz"), f"pipe:cat {' '.join(map(str, paths))}"):
        assert [sample["__key__"] for sample in read_shard(source)] == keys
    content = (tmp_path / "two.tar").read_bytes()
    for broken in (content[:-40_000], content + b"<html>" * 200, content[: paths[0].stat().st_size + 700], b"<html>" * 200):
        (tmp_path / "broken.tar").write_bytes(broken)
        with pytest.raises(ShardError, match="broken.tar: can't be read to its end: "):
            list(read_shard(str(tmp_path / "broken.tar")))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_standard_input_is_read_once_by_one_reader(picture_shards, num_workers) -> None:
    paths = picture_shards([30, 30])
    assert stream_sources("-") == stream_sources(["-"]) == ["-"]
    with pytest.raises(ShardError, match="-: standard input is read with --stream alone, as the only source of --data"):
        stream_sources(["-", *paths])
    (steps,) = read_from_stdin(paths, 60, num_workers)
    assert sorted(i[2] for ids in steps for i in ids) == [f"s{i:05d}" for i in range(60)]
    with pytest.raises(ShardError, match="standard input ended after 60 samples, and the run asks for more: send more, or lower --epochs"):
        read_from_stdin(paths, 61, num_workers)


def read_from_stdin(paths, epoch_samples, num_workers):
    own = os.dup(0)
    with subprocess.Popen(["cat", *paths], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        os.dup2(cat.stdout.fileno(), 0)
        try:
            return read(["-"], epoch_samples, num_workers=num_workers)
        finally:
            os.dup2(own, 0)
            os.close(own)


def test_every_reader_needs_a_shard() -> None:
    check_readers("abcd", 2, 2)
    with pytest.raises(ShardError, match="--stream: 3 shards for 4 readers .2 processes with 2 workers each.: each needs one of its own"):
        check_readers("abc", 2, 2)
    with pytest.raises(ShardError, match="--data -: standard input can't be dealt to 2 readers .* one reads it: give --nproc-per-node 1"):
        check_readers(["-"], 2, 1)


@pytest.mark.full
def test_a_run_trains_from_standard_input(picture_shards, tmp_path) -> None:
    paths = picture_shards([30] * 4)
    argv = base(["-"], tmp_path, "run", 1, "--stream", "--epoch-samples", 40, "--img-size", 32, "--num-classes", 3)
    at = argv.index("-j")
    with subprocess.Popen(["cat", *paths], stdout=subprocess.PIPE) as cat:
        command = [sys.executable, ROOT / "run.py", *argv[:at], *argv[at + 2 :]]  # the default number of workers: one
        ran = subprocess.run(list(map(str, command)), cwd=tmp_path, stdin=cat.stdout, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    seen = [i for batch in global_batches(tmp_path / "runs" / "run").values() for i in batch]
    assert len(seen) == 120 and len({key for *_, key in seen}) == 120


def test_a_streamed_run_says_what_it_does_not_promise(gloo_pool, picture_shards, tmp_path) -> None:
    paths = picture_shards([30] * 4)
    words = ["--stream", "--epoch-samples", 60, "--img-size", 32, "--num-classes", 3]
    commands = [f"pipe:cat {os.path.dirname(paths[0])}/{{000..003}}.tar"]
    with pytest.raises(ValueError, match="commands are not run: copy what it writes to a disk, or give --stream and --allow-pipe"):
        launch(gloo_pool, base(commands, tmp_path, "run", 2, *words))
    launch(gloo_pool, base(commands, tmp_path, "run", 2, *words, "--allow-pipe"))
    folder = tmp_path / "runs" / "run"
    log = (folder / "log.txt").read_text()
    assert "--stream: shards are read from end to end, and equal steps on all ranks are promised; each sample once an epoch, " in log
    assert "4 shards, 60 samples are called an epoch" in log and "60 samples seen, in " in log
    epochs = [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "epoch"]
    assert [(e["samples"], e["distinct"], e["missed"]) for e in epochs] == [(60, None, None)] * 3
    assert [len(batch) for batch in global_batches(folder).values()] == [12] * 15
    for missing in ("--epoch-samples", "--img-size", "--num-classes"):
        at = words.index(missing)
        with pytest.raises(ValueError, match="--stream needs --epoch-samples, --img-size and --num-classes or --classes"):
            launch(gloo_pool, base(paths, tmp_path, "no", 1, *words[:at], *words[at + 2 :]))
