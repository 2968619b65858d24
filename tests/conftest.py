"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real files beside the checkout; a user's machine has none, and then the test skips."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"{folder} is missing: CI must have it")
        pytest.skip(f"real files are not at {folder}")
    return folder
