"""A sample's stored label -> its class index, or one line that says what is wrong with it."""

from __future__ import annotations

import json
import pickle

import pytest

from data.errors import DataError
from data.labels import LabelMap, check_source, read_label

INTEGERS = LabelMap("cls", 10)
NAMES = LabelMap("cls", 3, ("cat", "dog", "emu"))


def bad(labels: LabelMap, **fields: bytes) -> str:
    with pytest.raises(DataError) as caught:
        labels.parse(fields)
    assert caught.value.field == labels.field and "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize(
    ("data", "label"), [(b"3", 3), (b" 3 ", 3), (b"3\r\n", 3), (b"03", 3), (b"\xef\xbb\xbf3", 3), (b"0", 0), (b"9", 9)]
)
def test_integer_labels(data: bytes, label: int) -> None:
    assert INTEGERS.parse({"cls": data, "jpg": b""}) == label
    assert LabelMap("txt", 10).parse({"txt": data}) == label


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the label is empty"),
        (b" \n", "the label is empty"),
        (b"3.0", "label '3.0' is not an integer, and no class names are known"),
        (b"-1", "label -1 is outside the classes 0..9"),
        (b"10", "label 10 is outside the classes 0..9"),
        (b"9" * 39, f"label {'9' * 39} is outside the classes 0..9"),
        (b"9" * 9999, f"label '{'9' * 40}' is not an integer, and no class names are known"),
        (b"cat", "label 'cat' is not an integer, and no class names are known"),
        (b"1\n2", "label '1\\n2' is not an integer, and no class names are known"),
        (b"\xff\xd8\xff\xe0", "not UTF-8 text: b'\\xff\\xd8\\xff\\xe0'... (invalid start byte at byte 0)"),
    ],
)
def test_bad_integer_labels(data: bytes, reason: str) -> None:
    assert bad(INTEGERS, cls=data) == reason


def test_class_names_in_cls() -> None:
    assert [NAMES.parse({"cls": data}) for data in (b"dog\n", b" emu ", b"0", b"2")] == [1, 2, 0, 2]
    assert bad(NAMES, cls=b"Dog") == "label 'Dog' is not one of the 3 class names"
    assert bad(NAMES, cls=b"3.0") == "label '3.0' is not one of the 3 class names"
    assert bad(NAMES, cls=b"3") == "label 3 is outside the classes 0..2"
    assert bad(NAMES, jpg=b"") == "no label: the sample's fields are jpg"


def test_an_integer_in_cls_is_an_index_even_where_names_are_numbers() -> None:
    names = ("10", "2", "3")  # as they sort
    assert LabelMap("cls", 3, names).parse({"cls": b"2"}) == 2
    assert LabelMap("txt", 3, names).parse({"txt": b"2"}) == 1
    assert LabelMap("json:a", 3, names).parse({"json": b'{"a": "2"}'}) == 1
    assert LabelMap("json:a", 3, names).parse({"json": b'{"a": 2}'}) == 2
    assert bad(LabelMap("txt", 3, names), txt=b"0") == "label '0' is not one of the 3 class names"


def test_json_labels() -> None:
    labels = LabelMap("json:annotation.label", 3, ("cat", "dog", "emu"))

    def document(value: object) -> bytes:
        return json.dumps({"annotation": {"label": value}, "id": 1}).encode()

    assert [labels.parse({"json": document(value)}) for value in (2, "dog", " cat ")] == [2, 1, 0]
    where = "at 'annotation.label' is neither an integer nor a class name"
    for value in (1.0, True, None, "", [1], {"a": 1}):
        assert bad(labels, json=document(value)) == f"label {str(value)[:40]!r} {where}"
    assert bad(labels, json=document(3)) == "label 3 is outside the classes 0..2"
    assert bad(labels, json=document("ant")) == "label 'ant' is not one of the 3 class names"
    no = "no 'annotation.label' in the JSON: looked for"
    assert bad(labels, json=b'{"b": 1, "a": 2}') == f"{no} 'annotation' and found keys a, b"
    assert bad(labels, json=b'{"annotation": {}}') == f"{no} 'label' and found keys none"
    assert bad(labels, json=b'{"annotation": "cat"}') == f"{no} 'label' and found a str"
    assert bad(labels, json=b"[1]") == f"{no} 'annotation' and found a list"
    assert bad(labels, json=b"{").startswith("not JSON: ")
    assert LabelMap("json:a", 5).parse({"json": b'{"a": "4"}'}) == 4


def test_remap() -> None:
    labels = LabelMap("cls", 5, ("a", "b", "c", "d", "e"), (4, 0))
    assert [labels.parse({"cls": data}) for data in (b"0", b"1", b"c")] == [4, 0, 2]
    assert bad(labels, cls=b"2") == "label 2 is outside the classes 0..1"


@pytest.mark.parametrize("source", ["cls", "txt", "json:a", "json:a.b.c"])
def test_label_sources(source: str) -> None:
    check_source(source)


@pytest.mark.parametrize("source", ["", "class", "jpg", "cls:a", "txt:", "JSON:a"])
def test_unknown_label_sources(source: str) -> None:
    with pytest.raises(ValueError, match=f"^label source '{source}' is not one of cls, txt, json:dotted.path$"):
        check_source(source)


@pytest.mark.parametrize("source", ["json", "json:", "json:a.", "json:.a", "json:a..b"])
def test_json_sources_need_a_path(source: str) -> None:
    with pytest.raises(ValueError, match=f"^label source '{source}': say where in the JSON the label is, as in json:"):
        check_source(source)


def test_label_map_pickles() -> None:
    copy = pickle.loads(pickle.dumps(NAMES))
    assert copy == NAMES and copy.parse({"cls": b"emu"}) == 2


def test_read_label_takes_any_buffer() -> None:
    assert read_label("cls", memoryview(b" 5 ")) == 5
