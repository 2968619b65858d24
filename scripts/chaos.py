"""Kill a training run again and again, resume it, and compare with one that nobody touched.

    python scripts/chaos.py --kills 20 --seed 0              same number of processes: weights equal to the last bit
    python scripts/chaos.py --kills 20 --seed 0 --elastic    processes, workers and batch size change at every resume

SIGKILL goes to a rank, a loader worker, the launcher, or rank 0 while it writes a checkpoint, at drawn steps. At the end every
global batch must hold the samples that the plan says, every epoch each sample once, and no process, shared memory or temporary
file may be left. Exit code 0: all of that held; 1: something did not, and the folder stays for a look.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from data.writer import ShardWriter, shard_names  # noqa: E402
from engine.flags import Parser  # noqa: E402
from engine.history import read_history  # noqa: E402

SIZES = (1100, 640, 333, 205, 97, 41, 7, 1, 0, 576)  # 3,000 samples
EPOCHS, BATCH_SIZE, INTERVAL = 3, 32, 9
VICTIMS = ("rank", "worker", "launcher")
SEEN: set[int] = set()  # the processes of all starts


@dataclass
class Life:
    """One start of the run: what was to be killed when, and what came of it."""

    world_size: int
    workers: int
    batch_size: int
    victim: str = "nobody"
    phase: str = "to its end"
    code: int | None = None
    step: int = 0  # the step that the audit had reached

    def __str__(self) -> str:
        start = f"{self.world_size} processes, {self.workers} workers, batch {self.batch_size}"
        return f"{start}: SIGKILL to {self.victim} {self.phase}, at step {self.step}, exit code {self.code}"


def make_shards(folder: Path, seed: int) -> None:
    """Shards of very different sizes; the class of a picture is its brightest channel."""
    from PIL import Image

    rng = np.random.default_rng((seed, 11))
    folder.mkdir(parents=True)
    serial = 0
    for name, size in zip(shard_names(len(SIZES)), SIZES, strict=True):
        with ShardWriter(folder / name) as writer:
            for _ in range(size):
                label = int(rng.integers(3))
                pixels = rng.integers(0, 120, (32, 32, 3), np.uint8)
                pixels[:, :, label] += 60
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG")
                writer.add(f"s{serial:05d}", {"png": file.getvalue(), "cls": str(label).encode()})
                serial += 1
            writer.finish()
            writer.publish()


class Session:
    """One launcher in a process session of its own, so that all it started can be found."""

    def __init__(self, work: Path, life: Life, name: str) -> None:
        self.folder, self.life = work / "runs" / name, life
        self.starts_before = len(read_tail(self.folder / "metrics.jsonl", '"event": "start"'))
        command = [
            sys.executable, str(ROOT / "run.py"), "--data", str(work / "shards"), "--model", "tiny", "--device", "cpu", "--audit",
            "--epochs", str(EPOCHS), "-b", str(life.batch_size), "-j", str(life.workers), "--nproc-per-node", str(life.world_size),
            "--output", str(work / "runs"), "--name", name, "--resume", "auto", "--checkpoint-interval", str(INTERVAL),
        ]  # fmt: skip
        self.output = open(work / "output.txt", "ab")
        environment = {**os.environ, "TMPDIR": str(work / "tmp")}
        self.process = subprocess.Popen(command, stdout=self.output, stderr=self.output, start_new_session=True, env=environment)

    def members(self) -> list[int]:
        """The living processes of this session."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
        SEEN.update(found)
        return found

    def ranks(self) -> list[int]:
        """The ranks' pids, rank 0 first."""
        return [pid for pid in children(self.process.pid) if b"resource_tracker" not in command_line(pid)]

    def is_training(self) -> bool:
        """Whether this start has written its first line, and so has cut the files back to where it begins."""
        return len(read_tail(self.folder / "metrics.jsonl", '"event": "start"')) > self.starts_before

    def last_start(self) -> dict[str, Any]:
        """The `start` line of this start."""
        line: dict[str, Any] = json.loads(read_tail(self.folder / "metrics.jsonl", '"event": "start"')[-1])
        return line

    def step(self) -> int:
        """The last step that rank 0 consumed."""
        lines = read_tail(self.folder / "audit" / "rank0.jsonl", '"step"', 1 << 14)
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait_until(self, met: Callable[[], bool], pause: float = 0.001) -> bool:
        """Wait for a condition; False if the run ended first."""
        while self.process.poll() is None:
            if met():
                return True
            time.sleep(pause)
        return False

    def close(self, seconds: float = 30.0) -> list[int]:
        """Wait for the end of the launcher and of all it started; the pids that are still there after that time."""
        end = time.monotonic() + seconds
        left = self.members()
        try:
            while time.monotonic() < end and (self.process.poll() is None or left):
                time.sleep(0.05)
                left = self.members()
        finally:  # Ctrl-C here must not leave a run behind that nobody watches
            for pid in self.members():
                os.kill(pid, signal.SIGKILL)
        self.life.code = self.process.wait()
        self.output.close()
        return left


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def read_tail(path: Path, word: str, size: int = 1 << 20) -> list[str]:
    """The whole lines with `word` among the last bytes of a file that another process writes."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    return [line for line in lines[1 if end > size else 0 : -1] if word in line]


def kill_once(session: Session, rng: random.Random, phase: str, kills_left: int) -> None:
    """Wait for the phase and kill; the life then says who it was."""
    life, folder = session.life, session.folder / "checkpoints"
    victim = rng.choice([v for v in VICTIMS if v != "worker" or life.workers])
    if phase == "start":
        life.phase = "while it starts"
        ready = session.wait_until(lambda: len(session.ranks()) == life.world_size)
        time.sleep(rng.random() * 3)
        victim = rng.choice(("rank", "launcher"))
    elif phase == "checkpoint":
        life.phase, victim = "while it writes a checkpoint", "rank 0"
        ready = session.wait_until(session.is_training) and session.wait_until(lambda: any(folder.glob("*.part")), pause=0)
    else:
        if not session.wait_until(session.is_training):
            return
        start = session.last_start()
        left = start["total_steps"] - start["step"]
        # spread over what is left of the run, so that it ends neither long before the kills are spent nor at once
        target = start["step"] + min(rng.randint(1, max(1, 2 * left // (kills_left + 1))), left - 1)
        life.phase = f"at step {target}"
        ready = session.wait_until(lambda: session.step() >= target)
    session.members()  # seen before they are gone
    ranks = session.ranks()
    workers = [pid for rank in ranks for pid in children(rank)]
    pids = {"launcher": [session.process.pid], "worker": workers, "rank": ranks, "rank 0": ranks[:1]}[victim] or [session.process.pid]
    if ready and session.process.poll() is None:
        number = rng.randrange(len(pids))
        life.victim = f"{victim} {number}" if victim in ("rank", "worker") else victim
        try:
            os.kill(pids[number], signal.SIGKILL)
        except ProcessLookupError:
            life.victim = f"{life.victim} (gone already)"


def draw_phases(kills: int, rng: random.Random) -> list[str]:
    """At least two kills in five in mid-epoch, one in five in a checkpoint's write (two where there are five or more)."""
    in_checkpoint = max(2, kills // 5) if kills >= 5 else min(1, kills)
    starting = kills // 10
    phases = ["checkpoint"] * in_checkpoint + ["start"] * starting + ["step"] * (kills - in_checkpoint - starting)
    rng.shuffle(phases)
    return phases


def draw_life(args: argparse.Namespace, rng: random.Random) -> Life:
    if not args.elastic:
        return Life(args.world_size, 1, BATCH_SIZE)
    return Life(rng.choice((1, 2, 3, 4)), rng.choice((0, 1, 3)), rng.choice((24, 32, 50, 64)))


def torment(work: Path, args: argparse.Namespace, problems: list[str]) -> list[Life]:
    """Run, kill and resume until the kills are spent, then to the end."""
    rng = random.Random(args.seed)
    phases = draw_phases(args.kills, rng)
    lives = []
    while True:
        life = draw_life(args, rng)
        session = Session(work, life, "chaos")
        try:
            if phases:
                kill_once(session, rng, phases[0], len(phases))
        except BaseException:
            session.close(seconds=0)
            raise
        remaining = session.close(seconds=args.patience if phases else 600 + args.patience)
        life.step = session.step()
        if remaining:
            problems.append(f"{life}: processes {remaining} were still there {args.patience:g} s later")
        caught = bool(phases) and (phases[0] != "checkpoint" or any((session.folder / "checkpoints").glob("*.part")))
        if phases and life.code != 0 and not caught:
            life.phase += " (too late: it was whole)"
        lives.append(life)
        print(f"  {len(lives):3d}. {life}", flush=True)
        if life.code == 0:
            if phases:
                problems.append(f"the run ended with {len(phases)} kills not spent")
            return lives
        if not phases:
            problems.append(f"the run failed though nobody was killed: see {work / 'output.txt'}")
            return lives
        if caught:
            phases.pop(0)


def counted_batches(folder: Path) -> dict[int, list[tuple[int, str, int]]]:
    """step -> the (epoch, shard, index) that counted, over all ranks, in the order of the slots."""
    steps: dict[int, list[tuple[int, str, int]]] = {}
    for path in sorted((folder / "audit").glob("rank*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            rows = zip(line["epoch"], line["ids"], line["valid"], strict=True)
            steps.setdefault(line["step"], []).extend((epoch, i[0], i[1]) for epoch, i, valid in rows if valid)
    return dict(sorted(steps.items()))


def check_plan(folder: Path, problems: list[str]) -> None:
    """Every global batch must be the stream's next samples, whatever its size was."""
    history = read_history(folder)
    batches = counted_batches(folder)
    if sorted(batches) != list(range(1, history.last_step + 1)):
        problems.append(f"{folder.name}: {len(batches)} steps in the audit, 1..{history.last_step} were due")
    for step, rows in batches.items():
        start = history.start_of(step)
        plan = history.plan(start)
        slots = plan.locate(np.arange(start.position_after(step - 1), start.position_after(step)))
        due = [(int(e), history.shards[s].name, int(i)) for e, s, i in zip(slots.epoch, slots.shard, slots.index, strict=True)]
        if rows != due:
            problems.append(f"{folder.name}: step {step} consumed other samples than the plan says")
            return
    audit = subprocess.run([sys.executable, str(ROOT / "scripts" / "audit.py"), str(folder)], capture_output=True, text=True, check=False)
    print(audit.stdout.rstrip())
    if audit.returncode:
        problems.append(f"{folder.name}: scripts/audit.py: {audit.stdout}{audit.stderr}")


def check_same_bits(work: Path, problems: list[str]) -> None:
    """Batches, weights and optimizer state of the killed run must be the unbroken one's."""
    import torch

    if counted_batches(work / "runs" / "whole") != counted_batches(work / "runs" / "chaos"):
        problems.append("the sequences of global batches differ")
    whole, chaos = (torch.load(work / "runs" / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "chaos"))
    left, right = (dict(tensors({"model": c["model"], "optimizer": c["optimizer"]})) for c in (whole, chaos))
    unequal = [key for key in left.keys() | right.keys() if key not in left or key not in right or not torch.equal(left[key], right[key])]
    if unequal or not left:
        problems.append(f"{len(unequal)} of {len(left)} tensors differ, the first is {sorted(unequal)[:1]}")
    print(f"{len(left)} tensors of weights and optimizer compared, {len(unequal)} differ")


def tensors(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, tensor) of every tensor in nested dicts and lists."""
    if hasattr(value, "dtype"):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [pair for key, item in items for pair in tensors(item, f"{path}.{key}")]


def check_leftovers(work: Path, problems: list[str]) -> None:
    """No temporary file, no shared memory may outlive the runs."""
    temporary = [path for path in (work / "tmp").iterdir() if not path.name.startswith("torchinductor_")]  # torch's own cache
    memory = [path for path in Path("/dev/shm").glob("torch_*") if int(path.name.split("_")[1]) in SEEN]  # torch_<pid>_...
    for path in [*temporary, *work.rglob("*.part"), *work.rglob("*.tmp"), *memory]:
        problems.append(f"left behind: {path}")


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how often to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the kills and the pictures (default: 0)")
    parser.add_argument("--elastic", action="store_true", help="change processes, workers and batch size at every resume")
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="processes, where not --elastic (default: 2)")
    parser.add_argument("--patience", type=float, default=30, metavar="S", help="seconds for all to be gone after a kill (default: 30)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    if not os.path.isdir("/proc/self/task"):
        parser.exit(2, "chaos.py: error: it finds processes through /proc, and there is none here\n")
    work = Path(tempfile.mkdtemp(prefix="chaos-"))
    (work / "tmp").mkdir()
    make_shards(work / "shards", args.seed)
    problems: list[str] = []
    began = time.monotonic()
    if not args.elastic:
        whole = Session(work, Life(args.world_size, 1, BATCH_SIZE), "whole")
        whole.close(seconds=600)
        print(f"unbroken run: exit code {whole.life.code}", flush=True)
    lives = torment(work, args, problems)
    check_plan(work / "runs" / "chaos", problems)
    if not args.elastic:
        check_same_bits(work, problems)
    check_leftovers(work, problems)
    print(f"{len(lives) - 1} kills, {time.monotonic() - began:.0f} s, seed {args.seed}: " + ("all held" if not problems else "FAILED"))
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    if problems or args.keep:
        print(f"the runs are in {work}")
    else:
        shutil.rmtree(work)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
