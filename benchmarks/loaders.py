"""Loaders side by side on the same data: `python benchmarks/loaders.py WORK --pictures FOLDER`.

in: a work folder (shards, other loaders' formats and results are kept in it), perhaps a folder of JPEGs  ->  out: a Markdown table
Invariant: every figure is from a process of its own, and rounds are interleaved: each starts every loader once, so that what the machine
does meanwhile hits all alike. Medians over rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent
STOCK = "webdataset"
TIMEOUT = 180  # seconds for one process: some loaders hang where they can't work


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results = args.work / f"results-{args.kind}.jsonl"
    if args.rounds:
        import inputs
        from measure import LOADERS

        inputs.shards_of(args.kind, args.work, args.pictures)
        peers = peers_python(args.work, args.install)
        wanted = [name for name, (_, kinds) in LOADERS.items() if args.kind in kinds and name in (args.loaders or LOADERS)]
        pythons = {name: python_for(LOADERS[name][0], peers) for name in wanted}
        for name in [name for name in wanted if not pythons[name]]:
            print(f"{name}: not installed, left out", file=sys.stderr)
        for _ in range(args.rounds):
            for workers in args.workers:
                for name in wanted:
                    if python := pythons[name]:
                        run_one(python, name, args, workers, results)
    print(table([json.loads(line) for line in results.read_text().splitlines()]))


def run_one(python: str, name: str, args: argparse.Namespace, workers: int, results: Path) -> None:
    """One loader once; its line is added to `results`, and a failure is said."""
    command = [python, str(FOLDER / "measure.py"), name, args.kind, str(args.work), str(workers), str(args.seconds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}, {workers} workers: nothing after {TIMEOUT} s", file=sys.stderr)
        return
    found = [line.removeprefix("RESULT ") for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name}, {workers} workers: failed: {last}", file=sys.stderr)
        return
    with results.open("a") as file:
        file.write(found[-1] + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for every number of workers the loaders, fastest first."""
    lines = ["| workers | loader | samples/s | x stock | samples per CPU s | x stock | first batch | memory |", "|---" * 8 + "|"]
    for workers in sorted({row["workers"] for row in rows}):
        here: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["workers"] == workers:
                here.setdefault(row["name"], []).append(row)
        rates = {name: median(row["rate"] for row in found) for name, found in here.items()}
        cpu = {name: median(row["per_cpu"] for row in found) for name, found in here.items()}
        for name in sorted(rates, key=lambda name: -rates[name]):
            found = here[name]
            low, high = min(row["rate"] for row in found), max(row["rate"] for row in found)
            ratio, cpu_ratio = (f"{by[name] / by[STOCK]:.1f}" if STOCK in by else "" for by in (rates, cpu))
            first, memory = median(row["first"] for row in found), max(row["memory"] for row in found) / 1e6
            shown = f"{rates[name]:,.0f} ({low:,.0f}-{high:,.0f})"
            lines.append(f"| {workers} | {name} | {shown} | {ratio} | {cpu[name]:,.0f} | {cpu_ratio} | {first:.2f} s | {memory:,.0f} MB |")
    return "\n".join(lines)


def peers_python(work: Path, install: bool) -> str | None:
    """The interpreter of the venv with the other loaders in `work`; made where `install` says so. It sees this one's packages, and so the
    same torch, through a .pth file: a torch of its own would cost 5 GB."""
    folder = work / "peers"
    python = folder / "bin" / "python"
    if install:
        venv.create(folder, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "lib" / version / "site-packages" / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (work / "constraints.txt").write_text(f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n")
        subprocess.run(
            [python, "-m", "pip", "install", "-r", FOLDER / "requirements-peers.txt", "-c", work / "constraints.txt"], check=True
        )
    return str(python) if python.exists() else None


def python_for(module: str, peers: str | None) -> str | None:
    """The first interpreter that can import `module`: this one, then the peers'."""
    for python in filter(None, (sys.executable, peers)):
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("work", type=Path, help="folder for shards, other loaders' formats, the peers' venv and results")
    parser.add_argument("--kind", choices=["pictures", "evaluation", "small", "tokens"], default="pictures", help="(default: %(default)s)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="JPEGs to read (default: drawn ones)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="0: only the table of what was measured before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed in each process (default: %(default)s)")
    parser.add_argument("--loaders", nargs="+", metavar="NAME", help="only these (default: all that are installed)")
    parser.add_argument("--install", action="store_true", help="first make the venv of the other loaders (1.6 GB)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
