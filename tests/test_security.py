"""Data and checkpoints of strangers: what is in them is never run and never becomes a path.

How much memory they can ask for: test_picture_limits.py.
"""

from __future__ import annotations

import ast
import copy
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
import tar_maker as tm
import torch
from picture_maker import encode

import run
from data import ShardError, build_loader
from data.decoders import decode
from data.errors import DataError
from engine import checkpoint
from scripts import make_shards, predict

ROOT = Path(__file__).resolve().parents[1]
PICTURE = encode(np.full((8, 8, 3), 77, np.uint8))


class Trap:
    """Its unpickling makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What a trap makes; it must not be there at the end."""
    path = tmp_path / "trap went off"
    pickle.loads(pickle.dumps(Trap(path)))
    path.rmdir()  # which shows that the trap works
    yield path
    assert not path.exists()


class Events:
    """What the interpreter reports to audit hooks, between `start` and `stop`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple]] = []
        self.recording = False
        sys.addaudithook(self._note)  # for good: so one for all tests

    def _note(self, event: str, args: tuple) -> None:
        if self.recording:
            self.seen.append((event, args))

    def __enter__(self) -> Events:
        self.seen.clear()
        self.recording = True
        return self

    def __exit__(self, *_: object) -> None:
        self.recording = False

    def opened(self, under: Path) -> set[str]:
        """Paths in `under` that were opened, relative to it."""
        paths = [os.fsdecode(args[0]) for event, args in self.seen if event == "open" and isinstance(args[0], (str, bytes))]
        return {os.path.relpath(path, under) for path in paths if path.startswith(f"{under}/")}

    def started(self) -> list[str]:
        """Commands and connections."""
        words = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", "urllib.Request")
        return [event for event, _ in self.seen if event in words]


EVENTS = Events()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def as_is(samples: Any) -> Any:
    yield from samples


# What is never unpickled


def trapped_fields(mark: Path) -> dict[str, bytes]:
    """The same trap, in every form and under every name that some library unpickles."""
    plain = pickle.dumps(Trap(mark))
    array, arrays, saved, legacy = (io.BytesIO() for _ in range(4))
    np.save(array, np.array([Trap(mark)], dtype=object), allow_pickle=True)
    np.savez(arrays, x=np.array([Trap(mark)], dtype=object))
    torch.save(Trap(mark), saved)
    torch.save(Trap(mark), legacy, _use_new_zipfile_serialization=False)
    fields = dict.fromkeys(("pyd", "pkl", "pickle", "pyc", "joblib", "dill"), plain)
    return {**fields, "npy": array.getvalue(), "npz": arrays.getvalue(), "pth": saved.getvalue(), "pt": legacy.getvalue()}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_members_of_a_tar_are_never_unpickled(tmp_path: Path, mark: Path, training: bool, num_workers: int) -> None:
    fields = trapped_fields(mark)
    trap = fields["pkl"]
    samples = [("0", {"png": PICTURE, "cls": b"1", **fields}), ("1", {"png": trap, "cls": b"1"}), ("2", {"png": PICTURE, "cls": trap})]
    path = tmp_path / "x.tar"
    path.write_bytes(tm.join_samples(samples) + tm.END)
    for stages in ((), (as_is,)):
        loader = build_loader(str(path), batch_size=3, training=training, shuffle=False, num_workers=num_workers, stages=stages)
        (batch,) = loader
        assert batch["valid"].tolist() == [True, False, False] and len(batch["errors"]) == 2


def test_decoders_unpickle_nothing(mark: Path) -> None:
    for field, data in trapped_fields(mark).items():
        if field == "npy":
            with pytest.raises(DataError, match="Object arrays cannot be loaded when allow_pickle=False"):
                decode(field, data)
        else:
            assert decode(field, data) == data


def test_a_checkpoint_with_code_in_it_is_refused_in_one_line(tmp_path: Path, mark: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "x.tar"
    shards.write_bytes(tm.join_samples([("0", {"png": PICTURE, "cls": b"0"})]) + tm.END)
    whole: dict[str, Any] = {key: 1 for key in checkpoint.KEYS}
    trap = Trap(mark)
    for name, value in {"bare": trap, "flags": {**whole, "flags": {"lr": trap}}, "model": {**whole, "model": {"w": trap}}}.items():
        torch.save(value, tmp_path / f"{name}.pt")
        torch.save(value, tmp_path / f"{name}-legacy.pt", _use_new_zipfile_serialization=False)
        (tmp_path / f"{name}-pickle.pt").write_bytes(pickle.dumps(value))
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == 9
    for path in files:
        with pytest.raises(ValueError) as refused:
            checkpoint.load(path)
        assert str(refused.value).startswith(f"--resume {path}: not a whole checkpoint (") and "\n" not in str(refused.value)
    words = ["--device", "cpu", "--model", "tiny", "--output", str(tmp_path / "runs")]
    for command in (["--data", str(shards)], ["--evaluate", "--val-data", str(shards)]):
        capfd.readouterr()
        assert run.cli([*words, *command, "--resume", str(tmp_path / "flags.pt")]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and "torch can't load it with weights_only=True" in err
    with pytest.raises(ValueError, match="torch can't load it with weights_only=True"):
        predict.Predictor(tmp_path / "bare.pt", "cpu", 5)


def find_calls(source: str) -> list[str]:
    """Calls that run what a file or a string says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in ("eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"):
            found.append(name)
        if name.startswith(("pickle.load", "marshal.load", "shelve.", "dill.", "joblib.load")) or name.endswith("Unpickler"):
            found.append(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append(name)
        if name in ("np.load", "numpy.load") or given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
            found.append(name)
    return found


def test_the_code_has_no_other_way_to_run_data() -> None:
    assert find_calls("torch.load(x); eval(y); f(shell=True); np.load(z)") == ["torch.load", "eval", "f", "np.load"]
    files = [ROOT / "run.py", *(path for name in ("data", "engine", "models", "scripts") for path in (ROOT / name).rglob("*.py"))]
    calls = {str(path.relative_to(ROOT)): found for path in files if (found := find_calls(path.read_text()))}
    # of batches that come through the pipe of this process's own workers, where multiprocessing pickles too; of the errors that mp.spawn's
    # own processes left for it
    assert calls == {"data/block.py": ["pickle.loads"], "engine/launcher.py": ["pickle.loads"]}


# What never becomes a path


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every path in a folder with its content or link."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        for path in folder.rglob("*")
    }


def odd_members(home: Path) -> list[bytes]:
    """Pictures whose names and links point out of the folder they lie in, at files that exist and at others."""
    secret = f"{home}/secret"
    names = [f"{home}/new.png", f"{secret}.png", "../../new.png", "../secret.png", "a/../../new.png", "./../new.png"]
    names += ["/new.png", "~/new.png", "C:\\new.png"]
    link = tm.header(b"link", 0, b"2")[:157] + secret.encode().ljust(100, b"\0")  # to an existing folder
    blank = link + tm.header(b"link", 0, b"2")[257:]
    total = sum(blank[:148]) + 8 * 32 + sum(blank[156:])
    linked = blank[:148] + b"%06o\0 " % total + blank[156:]
    return [linked, tm.member("link/new.png", PICTURE), tm.header(b"hard.png", 0, b"1"), *(tm.member(name, PICTURE) for name in names)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a secret in it; shards lie two folders deeper, in a/b."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret.png").write_bytes(encode(np.zeros((8, 8, 3), np.uint8)))
    return tmp_path


def test_names_in_a_tar_are_no_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = odd_members(home)
    labels = [tm.member(f"{i}.cls", b"0") for i in range(2)]  # of samples without pictures
    path = home / "a" / "b" / "x.tar"
    path.write_bytes(b"".join(labels + pictures) + tm.END)
    monkeypatch.chdir(path.parent)
    before = tree(home)
    with EVENTS:
        batches = list(build_loader("x.tar", batch_size=4, training=False, img_size=8))
    assert sum(len(batch["errors"]) for batch in batches) == len(pictures) - 2 + len(labels)  # all lack a field, none found one elsewhere
    after = tree(home)
    assert after.pop("a/b/x.tar.idx") and after == before
    ours = {"a/b/x.tar", "a/b/x.tar.idx", "a/b/dataset.json", "a/dataset.json"}
    assert {name for name in EVENTS.opened(home) if not name.endswith(".tmp")} <= ours
    assert not EVENTS.started()


def test_make_shards_takes_no_names_as_paths(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Class folders in an archive whose names lead out of it: nothing is written but the shards."""
    source = home / "a" / "b" / "photos.tar"
    labelled = [tm.member("../../cat/1.png", PICTURE), tm.member("/dog/../../dog/2.png", PICTURE)]
    source.write_bytes(b"".join([*odd_members(home), *labelled]) + tm.END)
    monkeypatch.chdir(source.parent)
    before = tree(home)
    with EVENTS:
        code = make_shards.main([str(source), str(home / "out"), "--workers", "1", "--num-shards", "1"])
    after = tree(home)
    assert code == 0
    assert {name: after[name] for name in before} == before
    assert all(name == "out" or name.startswith("out/") for name in after.keys() - before.keys())
    assert not {name for name in EVENTS.opened(home) if not name.startswith("out")} - {"a/b/photos.tar"}
    for shard in (home / "out").glob("*.tar"):
        content = shard.read_bytes()
        assert b"cat_1.png" in content and b"dog_2.png" in content and b"/../" not in content
        assert before["secret.png"] not in content  # type: ignore[operator]


# What is never run or fetched

COMMANDS = [
    "pipe:touch mark", "pipe: touch mark", "pipe:touch mark # x.tar", "x.tar::pipe:touch mark", "file:pipe:touch mark", "PIPE://touch mark",
    "PIPE:touch mark", "pipe:curl http://127.0.0.1:9/x.tar", "x.tar::pipe:touch mark::http://127.0.0.1:9/x.tar",
]  # fmt: skip
NO_STORES = [  # what opens files of this machine, or runs code, under a URL's name
    "ais://bucket/x.tar", "local:///etc/x.tar", "memory://x.tar", "zip://x.tar", "tar://x.tar", "reference://x.tar", "git://repo/x.tar",
    "simplecache://x.tar", "data://x.tar", "dask://x.tar", "jupyter://x.tar", "asynclocal://x.tar",
]  # fmt: skip
NO_FILES = [
    " pipe:touch mark", "data:application/x-tar;base64,AAAA", "file://host/x.tar", "$(touch mark)", "`touch mark`",
    "| touch mark", "touch mark |", "x.tar; touch mark", "-",
]  # fmt: skip


@pytest.mark.parametrize("pattern", [*COMMANDS, *NO_STORES, *NO_FILES])
@pytest.mark.parametrize("through", ["pattern", "list"])
def test_commands_and_what_is_no_store_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, through: str) -> None:
    monkeypatch.chdir(tmp_path)
    tm.write_shard(tmp_path / "x.tar", 2)
    (tmp_path / "list.txt").write_text(pattern + "\n")
    before = sorted(os.listdir(tmp_path))
    with EVENTS, pytest.raises(ShardError) as refused:
        build_loader("list.txt" if through == "list" else pattern, batch_size=2)
    assert not EVENTS.started() and sorted(os.listdir(tmp_path)) == before
    assert str(refused.value).isprintable()
    if pattern in COMMANDS:
        assert "commands are not run: copy what it writes to a disk, or give --stream and --allow-pipe" in str(refused.value)
    if pattern in NO_STORES:
        assert "is no store of shards" in str(refused.value) or "fsspec knows no store named" in str(refused.value)


def test_a_list_from_a_server_names_no_files_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "www").mkdir()
    with servers.serve(tmp_path / "www", tmp_path / "nginx") as served:
        here = str(tm.write_shard(tmp_path / "x.tar", 2))
        for line in (here, f"..{here}", "x.tar", "~/x.tar"):
            monkeypatch.chdir(tmp_path)
            (tmp_path / "www" / "list.txt").write_text(line + "\n")
            with pytest.raises(ShardError, match=f"{served.url}/.*: not there \\(404\\)"):
                build_loader(f"{served.url}/list.txt", batch_size=2)
        (tmp_path / "www" / "list.txt").write_text(f"file://{here}\n")
        with pytest.raises(ShardError, match="a list from a server names no files of this machine"):
            build_loader(f"{served.url}/list.txt", batch_size=2)


def test_a_pipe_with_a_name_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(ShardError, match="x.tar: can't be read: not a regular file"):
        build_loader(str(tmp_path), batch_size=2)


def test_copies_of_a_loader_hold_no_code(tmp_path: Path) -> None:
    """A state is plain values: it may lie in a checkpoint that loads with weights_only=True."""
    tm.write_shard(tmp_path / "x.tar", 2)
    state = build_loader(str(tmp_path), batch_size=2, img_size=8).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == copy.deepcopy(state)
