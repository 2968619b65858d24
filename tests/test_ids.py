"""ids.py: names that are made when they are asked for are as a list of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from data.ids import Ids, Keys

TEXTS = ["a/1", "", "größe", "caf\udce9", "a/1"]


def test_keys_are_as_a_list():
    keys = Keys.of(TEXTS)
    assert list(keys) == TEXTS and keys == TEXTS and keys != TEXTS[1:] and keys != 5
    assert [keys[i] for i in range(-5, 5)] == TEXTS * 2
    assert keys[1:4] == TEXTS[1:4] and keys[::-2] == TEXTS[::-2]
    assert "größe" in keys and keys.index("größe") == 2 and len(keys) == 5
    assert repr(keys) == repr(TEXTS)
    with pytest.raises(IndexError):
        keys[5]
    assert list(Keys.of([])) == []


def test_ids_are_as_a_list_here_and_elsewhere():
    ids = Ids({3: "3.tar", 0: "0.tar"}, np.array([3, 3, 0, 3, 0]), np.array([7, 1, 0, 2, 9]), Keys.of(TEXTS))
    expected = [("3.tar", 7, "a/1"), ("3.tar", 1, ""), ("0.tar", 0, "größe"), ("3.tar", 2, "caf\udce9"), ("0.tar", 9, "a/1")]
    for there in (ids, pickle.loads(pickle.dumps(ids))):
        assert there == expected and expected == list(there) and there[-1] == expected[-1]
        assert {type(part) for part in there[0]} == {str, int}
    assert ids == Ids({3: "3.tar", 0: "0.tar"}, ids.shard, ids.number, ids.keys)
