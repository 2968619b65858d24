"""What a flag's text may be.

in: the text of a value  ->  out: the value
Invariant: what is refused is said in one line that holds the text.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type of whole numbers from `low` up, perhaps to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type of numbers in low..high."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            bounds = f"from {low:g} up" if math.isinf(high) else f"in {low:g}..{high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return value

    return parse


def interval(text: str) -> int | str:
    """Steps ("500"), or a time ("90s", "10m", "1.5h"), which stays as it is written; see `split_interval`."""
    if text[-1:] in UNITS:
        number(0.001)(text[:-1])
        return text
    return integer(0)(text)


def split_interval(value: int | str) -> tuple[int, float]:
    """An interval as (steps, seconds); the one that it is not is 0."""
    return (0, float(value[:-1]) * UNITS[value[-1]]) if isinstance(value, str) else (value, 0.0)


def byte_size(text: str) -> int:
    """A number of bytes, like 200GB or 1.5T; thousands, as disks are sold."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    value = int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")) if match else 0
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, like 200GB")
    return value
