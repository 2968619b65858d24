"""scripts/chaos.py: a run that is killed again and again ends as one that nobody touched.

The short form runs always. `make test-full` kills 20 times on one seed, and on more where CHAOS_SEEDS says so; `make soak` on three.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "0").split(",")]
LIFE = re.compile(
    r"^ *\d+\. (\d) processes, (\d) workers, batch (\d+): SIGKILL to (.+?) "
    r"(while .+?|at step \d+|to its end), at step (\d+), exit code (-?\d+)$"
)


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, where chaos.py makes its own and looks for what was left; pytest's has a path too long for sockets."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def torment(tmp_path: Path, *words: object) -> list[tuple[str, ...]]:
    """Run chaos.py and see that all held; what became of each start: processes, workers, batch, victim, phase, step, exit code."""
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--patience", "240", *map(str, words)]  # this machine may be busy
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3000)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0 and "all held" in done.stdout, said
    lives = [found.groups() for line in done.stdout.splitlines() if (found := LIFE.match(line))]
    assert lives[-1][3] == "nobody" and lives[-1][6] == "0", said
    assert not list(tmp_path.glob("chaos-*")), "the folder of a run that held must be gone"
    return lives


def phases(lives: list[tuple[str, ...]]) -> list[str]:
    return [life[4] for life in lives[:-1]]


def check_twenty(lives: list[tuple[str, ...]]) -> None:
    found = phases(lives)
    assert len(found) >= 20
    assert sum(phase.startswith("at step") for phase in found) >= 5
    assert sum(phase == "while it writes a checkpoint" for phase in found) >= 2
    victims = {life[3].split()[0] for life in lives[:-1]}
    assert {"rank", "launcher"} <= victims and "worker" in victims


def test_three_kills(tmp_path: Path) -> None:
    found = phases(torment(tmp_path, "--kills", 3, "--seed", 0))
    assert len(found) >= 3
    assert any(phase.startswith("at step") for phase in found) and "while it writes a checkpoint" in found


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_kills_change_no_bit(tmp_path: Path, seed: int) -> None:
    check_twenty(torment(tmp_path, "--kills", 20, "--seed", seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_kills_with_other_processes_workers_and_batches_at_each_start(tmp_path: Path, seed: int) -> None:
    lives = torment(tmp_path, "--kills", 20, "--seed", seed, "--elastic")
    check_twenty(lives)
    for column, least in ((0, 3), (1, 2), (2, 3)):
        assert len({life[column] for life in lives}) >= least
