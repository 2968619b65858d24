"""Which class a sample belongs to.

in: the fields of a sample and a label source ("cls", "txt", "json:a.b")  ->  out: class index in [0, num_classes)
Invariant: a stored integer is always an index, a stored word always a name; what is neither, or is outside the classes, is
a `DataError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from .decoders import Buffer, decode_json, decode_text, parse_integer
from .errors import DataError, printable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LabelMap:
    """The classes, and how to find a sample's. `remap`: stored integer -> class, for shards that count in another order."""

    source: str
    num_classes: int
    names: tuple[str, ...] | None = None
    remap: tuple[int, ...] | None = None
    _positions: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_positions", {name: i for i, name in enumerate(self.names or ())})

    @property
    def field(self) -> str:
        """The field that holds the label."""
        return self.source.partition(":")[0]

    def parse(self, fields: Mapping[str, Any]) -> int:
        """The class index of a sample, in [0, num_classes). Raises DataError that names the field."""
        data = self._data(fields)
        try:
            return self.index(read_label(self.source, data))
        except DataError as error:
            raise DataError(error.reason, field=self.field) from None

    def parse_several(self, fields: Mapping[str, Any]) -> list[int]:
        """The class indexes of a sample with any number of labels, sorted, each once. Raises DataError that names the field."""
        data = self._data(fields)
        try:
            return sorted({self.index(label) for label in read_labels(self.source, data)})
        except DataError as error:
            raise DataError(error.reason, field=self.field) from None

    def _data(self, fields: Mapping[str, Any]) -> Buffer:
        data: Buffer | None = fields.get(self.field)
        if data is None:
            raise DataError(f"no label: the sample's fields are {list_fields(fields)}", field=self.field)
        return data

    def index(self, label: int | str) -> int:
        """The class of a label as it is stored. Raises DataError."""
        if isinstance(label, str):
            if self.names is not None:
                position = self._positions.get(label)
                if position is None:
                    raise DataError(f"label {label[:40]!r} is not one of the {len(self.names)} class names")
                return position
            number = parse_integer(label)
            if number is None:
                raise DataError(f"label {label[:40]!r} is not an integer, and no class names are known")
            label = number
        limit = self.num_classes if self.remap is None else len(self.remap)
        if not 0 <= label < limit:
            raise DataError(f"label {str(label)[:40]} is outside the classes 0..{limit - 1}")
        return label if self.remap is None else self.remap[label]


def check_source(source: str) -> None:
    """Raises ValueError for a label source that is none of ours."""
    name, colon, path = source.partition(":")
    if name == "json" and not all(path.split(".")):
        raise ValueError(f"label source {source!r}: say where in the JSON the label is, as in json:annotation.label")
    if name not in ("cls", "txt", "json") or (colon and name != "json"):
        raise ValueError(f"label source {source!r} is not one of cls, txt, json:dotted.path")


def read_label(source: str, data: Buffer) -> int | str:
    """The label as it is stored: an integer (index) or a word (name). Text in `txt` and strings in JSON are words, "3" too."""
    name, _, path = source.partition(":")
    if name == "json":
        return _as_label(_find_in_json(decode_json(data), path), path)
    text = decode_text(data).strip()
    if not text:
        raise DataError("the label is empty")
    number = parse_integer(text) if name == "cls" else None
    return text if number is None else number


def read_labels(source: str, data: Buffer) -> list[int | str]:
    """The labels of a sample that may have several, or none: a list in JSON (or one label), or text with commas or spaces between them.

    With a comma in the text, only commas part labels: names may then hold spaces.
    """
    name, _, path = source.partition(":")
    if name == "json":
        value = _find_in_json(decode_json(data), path)
        return [_as_label(item, path) for item in (value if isinstance(value, list) else [value])]
    text = decode_text(data)
    words = [word.strip() for word in (text.split(",") if "," in text else text.split())]
    numbers = [parse_integer(word) if name == "cls" else None for word in words]
    return [word if number is None else number for word, number in zip(words, numbers, strict=True) if word]


def _find_in_json(value: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            found = f"keys {list_fields(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise DataError(f"no {path!r} in the JSON: looked for {key!r} and found {found}")
        value = value[key]
    return value


def _as_label(value: Any, path: str) -> int | str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DataError(f"label {str(value)[:40]!r} at {path!r} is neither an integer nor a class name")


def find_field(fields: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    """The one of `names` that the sample has. Raises DataError for none, and for two: which one is meant can't be known."""
    found = [name for name in names if name in fields]
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"no {what}: the sample's fields are {list_fields(fields)}")
    raise DataError(f"{len(found)} {what}s in one sample: {', '.join(found)}", field=found[0])


def list_fields(fields: Mapping[str, Any]) -> str:
    """Field names for a message, at most twelve."""
    names = sorted(printable(str(name)) for name in fields if not str(name).startswith("__"))
    return (", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")) or "none"


class OneLabel:
    """The part of a task that is about its labels: one class a sample, "label" int64 (n,)."""

    __slots__ = ()
    labels: LabelMap
    several_labels: ClassVar[bool] = False

    def new_labels(self, num_slots: int) -> torch.Tensor:
        """The memory of a batch's labels, all zeros."""
        import torch  # here, not above: tools that only look at labels start without it

        return torch.zeros(num_slots, dtype=torch.int64)

    def read_label(self, fields: Mapping[str, Any]) -> Any:
        """What the slot of "label" becomes. Raises DataError."""
        return self.labels.parse(fields)


class SeveralLabels(OneLabel):
    """Any number of classes a sample: "label" uint8 (n, classes), 1 for each class that the sample has."""

    __slots__ = ()
    several_labels: ClassVar[bool] = True

    def new_labels(self, num_slots: int) -> torch.Tensor:
        """The memory of a batch's labels, all zeros."""
        import torch  # here, not above: tools that only look at labels start without it

        return torch.zeros((num_slots, self.labels.num_classes), dtype=torch.uint8)

    def read_label(self, fields: Mapping[str, Any]) -> torch.Tensor:
        """1 at the classes of a sample. Raises DataError."""
        import torch

        row = torch.zeros(self.labels.num_classes, dtype=torch.uint8)
        row[self.labels.parse_several(fields)] = 1
        return row
