"""Which classes there are: from a list, from dataset.json, or from the labels themselves.

in: shards, a label source, perhaps a list of names  ->  out: `LabelMap`
Invariant: the names of two data sets are matched by name, never by position; a name that has no class stops the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .decoders import parse_integer
from .errors import ShardError
from .labels import LabelMap, check_source
from .scan import MAX_CLASSES, count_labels, peek_labels
from .shards import Shard, read_dataset_json


def resolve_labels(
    shards: Sequence[Shard],
    source: str,
    classes: Sequence[str] | None = None,
    num_classes: int | None = None,
    num_workers: int | None = None,
    several: bool = False,
) -> LabelMap:
    """The label map of these shards, whose samples have one label each, or `several`.

    `classes`: names in their order (training's, for a validation set). Without them those of dataset.json; without that
    every label is looked at: words become sorted names, integers say only how many classes there are. Raises ShardError
    for a field that no sample has, for a name of these shards that is not in `classes`, for more names than `num_classes`.
    """
    check_source(source)
    labels = peek_labels(shards, source, several)
    names = None if classes is None else _checked_names(classes, "the given classes")
    own = _own_names(shards)
    remap = None
    if names is None:
        names = own
    elif own is not None:
        remap = _remap(own, names, shards[0])
    elif not _are_integers(labels):
        _refuse_unknown(count_labels(shards, source, num_workers, several), names)
    if names is None and (num_classes is None or not _are_integers(labels)):
        names, found = _classes_found(count_labels(shards, source, num_workers, several), source)
        num_classes = found if num_classes is None else num_classes
    if names is not None and num_classes is not None and num_classes < len(names):
        raise ShardError(
            f"num_classes is {num_classes}, but there are {len(names)} class names ({_some(names)}): raise it, or leave it out"
        )
    return LabelMap(source, num_classes or len(names or ()), names, remap)


def _own_names(shards: Sequence[Shard]) -> tuple[str, ...] | None:
    listing = read_dataset_json(shards)
    classes = (listing or {}).get("classes")
    return _checked_names(classes, "the classes in dataset.json") if classes else None


def _checked_names(classes: Any, where: str) -> tuple[str, ...]:
    if not isinstance(classes, (list, tuple)) or not all(isinstance(name, str) and name.strip() for name in classes):
        raise ShardError(f"{where} must be a list of names, none of them empty; got {str(classes)[:80]}")
    names = tuple(name.strip() for name in classes)
    if not names:
        raise ShardError(f"{where} are none: list at least one name")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ShardError(f"{where} name {_some(twice)} more than once: a name stands for one class")
    return names


def _remap(own: tuple[str, ...], names: tuple[str, ...], shard: Shard) -> tuple[int, ...] | None:
    if own == names:
        return None
    positions = {name: i for i, name in enumerate(names)}
    unknown = [name for name in own if name not in positions]
    if unknown:
        raise ShardError(
            f"{len(unknown)} of the {len(own)} classes in the dataset.json of {shard.path} are not among the "
            f"{len(names)} given classes: {_some(unknown)}; leave those samples out, or train with all of the classes"
        )
    return tuple(positions[name] for name in own)


def _refuse_unknown(found: Counter[int | str], names: tuple[str, ...]) -> None:
    unknown = sorted({label for label in found if isinstance(label, str)} - set(names))
    if unknown:
        raise ShardError(
            f"labels of {sum(found[name] for name in unknown)} samples are not among the {len(names)} given classes: "
            f"{_some(unknown)}; leave those samples out, or add the names to the classes"
        )


def _are_integers(labels: Counter[int | str]) -> bool:
    """Whether most are: one damaged label does not decide."""
    return 2 * sum(n for label, n in labels.items() if _number(label) is not None) >= labels.total() > 0


def _number(label: int | str) -> int | None:
    return label if isinstance(label, int) else parse_integer(label)


def _classes_found(found: Counter[int | str], source: str) -> tuple[tuple[str, ...] | None, int]:
    """Names (for words) and the number of classes."""
    if _are_integers(found):
        numbers = [n for n in map(_number, found) if n is not None and 0 <= n < MAX_CLASSES]
        if not numbers:
            raise ShardError(f"no label in {source} is an integer in 0..{MAX_CLASSES - 1}; found {_some(found)}")
        return None, max(numbers) + 1
    names = tuple(sorted(label for label in found if isinstance(label, str)))
    return names, len(names)


def _some(names: Any) -> str:
    shown = [repr(str(name)[:40]) for name, _ in zip(names, range(3), strict=False)]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read_classes(path: str) -> list[str]:
    """Class names in their order, from a dataset.json, a JSON list, or a text file with a name on each line. Raises
    ShardError."""
    file = Path(path)
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(
            f"classes file {path} can't be read ({error}): give a dataset.json, a JSON list, or a text with one name a line"
        ) from None
    if file.suffix == ".json" or text.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ShardError(f"classes file {path} is not JSON ({error}): mend it, or give one name a line") from None
        value = value.get("classes") if isinstance(value, dict) else value
        return list(_checked_names(value, f"the classes in {path}"))
    return list(_checked_names(text.rstrip().splitlines() if text.strip() else [], f"the classes in {path}"))
