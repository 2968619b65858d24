"""scripts/command.py: a mistake is one line, and every command has one parser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import ShardError
from scripts import command

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    "agreement", "audit", "benchmark", "browse", "chaos", "check_shards", "contact_sheet", "index_shards", "make_motion_clips",
    "make_shards", "plot_run", "predict", "screenshots", "show_batch", "shuffle_report",
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("two\nlines"), 2, "x.py: error: two lines\n"),
        (ShardError("a.tar: empty"), 2, "x.py: error: a.tar: empty\n"),
        (FileNotFoundError(2, "No such file or directory", "/no/x"), 2, "x.py: error: /no/x: No such file or directory\n"),
        (OSError("no more"), 2, "x.py: error: no more\n"),
        (KeyboardInterrupt(), 130, "x.py: interrupted\n"),
    ],
)
def test_how_a_command_ends(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str) -> None:
    def work() -> None:
        raise error

    assert (command.end("x.py", work), capsys.readouterr().err) == (code, said)


def test_a_command_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.end("x.py", lambda: None) == 0 and command.end("x.py", lambda: 1) == 1
    with pytest.raises(TypeError):  # the code is at fault
        command.end("x.py", lambda: len(3))  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


def test_all_commands_are_here() -> None:
    assert COMMANDS == sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "command")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("agreement", "predict")])  # these load torch first
def test_an_unknown_flag_is_one_line(name: str) -> None:
    words = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--no-such-flag-at-all", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(f"{name}.py: error: ") and done.stderr.count("\n") == 1
