"""What README and docs say: the commands parse, the flags exist, the links lead somewhere, the Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import flags

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def page_names() -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES]


def python_of(name: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The argv of every run.py in an indented or fenced block; what stands before it (torchrun, variables) is cut."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"    .*\b(python|torchrun|srun)\b.* run\.py ", line):
            words = shlex.split(line, comments=True)
            found.append(words[words.index("run.py") + 1 :])
    return found


@pytest.mark.parametrize("name", page_names())
def test_every_command_of_a_page_parses(name: str) -> None:
    for argv in commands((ROOT / name).read_text()):
        if "..." not in argv:
            flags.build_parser().parse_args(argv)


def test_commands_are_found() -> None:
    assert ["--data", "a b", "-b", "2"] in commands("x\n\n    torchrun --nnodes 2 run.py --data 'a b' \\\n      -b 2   # why\n")


def test_every_flag_named_as_ours_exists() -> None:
    """The second column of the tables in coming_from.md is ours."""
    ours = {name for action in flags.build_parser()._actions for name in action.option_strings}
    scripts = {"make_shards.py"}
    rows = [line.split(" | ") for line in (ROOT / "docs/coming_from.md").read_text().splitlines() if line.startswith("| ")]
    named = {flag for row in rows if not any(s in row[1] for s in scripts) for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row[1])}
    assert len(named) > 20
    assert named - ours == set()


@pytest.mark.parametrize("name", page_names())
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", page_names())
def test_files_in_backticks_exist(name: str) -> None:
    named = re.findall(r"`((?:data|engine|models|scripts|tests|docs|recipes|examples)/[\w./-]+\.\w+)`", (ROOT / name).read_text())
    assert [path for path in named if not (ROOT / path).exists() and "NAME" not in path] == []


@pytest.mark.parametrize("name", [name for name in page_names() if python_of(name)])
def test_the_python_of_a_page_runs(name: str, tmp_path: Path, picture_shards: Callable[..., list[str]]) -> None:
    (tmp_path / "shards").mkdir()
    picture_shards([20, 13], name="shards/train")
    code = tmp_path / "page.py"
    code.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(python_of(name)))
    ran = subprocess.run([sys.executable, str(code)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
