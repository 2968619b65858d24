"""What measuring who waits costs: `python benchmarks/timing_overhead.py [FOLDER OF JPEGS]`.

in: examples/digits.zip (pictures of 8x8, the worst case), perhaps photographs  ->  out: laps a sample, their share of CPU time
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from time import process_time

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data import build_loader, timing  # noqa: E402
from engine.waits import Waits  # noqa: E402


def cost_of_a_lap() -> float:
    """Seconds, the least of several tries."""
    timing.restart()
    return min(timeit.repeat("lap('read')", globals={"lap": timing.lap}, number=100_000, repeat=7)) / 100_000


def cost_of_a_step() -> float:
    """Seconds that a trainer's laps take in a step on the CPU."""
    waits = Waits(torch.device("cpu"), num_workers=2)
    times = {"worker": 0, "seconds": dict.fromkeys(timing.WORK, 0.1)}

    def step() -> None:
        waits.begin()
        waits.lap("data")
        waits.batch(times)
        for name in ("transfer", "forward", "count", "backward", "update"):
            waits.lap(name)

    return min(timeit.repeat(step, number=10_000, repeat=7)) / 10_000


def measure(shards: Path, batch_size: int, img_size: int | None) -> tuple[float, float]:
    """(laps a sample, seconds of CPU a sample) of one epoch, after one to warm up."""
    counted = 0
    whole = timing.Laps.lap

    def lap(self: timing.Laps, name: str) -> None:
        nonlocal counted
        counted += 1
        whole(self, name)

    def epoch() -> int:
        return sum(len(batch["valid"]) for batch in build_loader(str(shards), batch_size=batch_size, img_size=img_size))

    epoch()
    begin = process_time()
    num = epoch()
    took = process_time() - begin
    timing.Laps.lap = lap  # type: ignore[method-assign]
    epoch()
    timing.Laps.lap = whole  # type: ignore[method-assign]
    return counted / num, took / num


def main() -> None:
    torch.set_num_threads(1)
    lap, step = cost_of_a_lap(), cost_of_a_step()
    print(f"a lap of the loader: {1e9 * lap:.0f} ns; the trainer's laps of a step: {1e6 * step:.1f} us")
    with tempfile.TemporaryDirectory() as folder:
        sources = [("digits, 8x8", ROOT / "examples" / "digits.zip", 64, 8)]
        sources += [("photographs, 224x224", Path(sys.argv[1]), 32, 224)] if len(sys.argv) > 1 else []
        for name, source, batch_size, img_size in sources:
            out = Path(folder) / name.partition(",")[0]
            command = [sys.executable, str(ROOT / "scripts/make_shards.py"), str(source), str(out), "--num-shards", "2"]
            subprocess.run(command, check=True, capture_output=True)
            laps, seconds = measure(out, batch_size, img_size)
            print(f"{name}: {laps:.2f} laps a sample, {1e6 * seconds:.0f} us of CPU a sample: {100 * laps * lap / seconds:.2f} %")


if __name__ == "__main__":
    main()
