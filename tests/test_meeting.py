"""meeting.py over stores that are older than the ranks: only who is there now counts, and who is not is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from engine.launcher import Stopped
from engine.meeting import meet


@pytest.fixture(params=["tcp", "file"])
def door(request, tmp_path):
    """A function that gives a new client of one store."""
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "meet"))
        return
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", held.port, is_master=False, timeout=timedelta(seconds=30))


def come(door, ranks, world_size, seconds=30.0, told="now"):
    """What `meet` gives each of these ranks, or what it raises."""

    def one(rank):
        try:
            return meet(door(), rank, world_size, seconds, {"told": f"{rank} {told}"})
        except Stopped as stopped:
            return str(stopped)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_hear_what_each_told(door):
    for world_size in (1, 3):
        for _, cards in come(door, range(world_size), world_size):
            assert [card["told"] for card in cards] == [f"{rank} now" for rank in range(world_size)]


def test_what_an_earlier_start_left_does_not_count(door):
    come(door, range(3), 3, told="then")
    come(door, [0, 2], 3, told="broken off", seconds=0.3)
    met = come(door, [2, 1, 0], 3)  # rank 0 comes last, so the others find the old doors first
    assert [[card["told"] for card in cards] for _, cards in met] == [[f"{rank} now" for rank in range(3)]] * 3
    room, _ = met[0]
    room.set("key", "value")
    assert all(other.get("key") == b"value" for other, _ in met)
    assert not any(store.check(["key"]) for store, _ in come(door, range(2), 2))


def test_who_does_not_come_is_named_by_all_who_did(door):
    line = "ranks 2, 3 of 4 did not come up within 0.5 s (--dist-timeout): see what they said"
    for text in come(door, [1, 0], 4, seconds=0.5):
        assert text.startswith(line)


def test_a_missing_rank_0_is_named_too(door):
    come(door, range(4), 4, told="then")
    (text,) = come(door, [1], 4, seconds=0.3)
    assert text.startswith("rank 0 of 4 did not come up within 0.3 s (--dist-timeout): see what they said")


def test_rank_0_leaves_with_its_store():
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", held.port, is_master=False, timeout=timedelta(seconds=5))
    del held
    with pytest.raises(Stopped, match="rank 0 has left, and the store with it: see what it said"):
        meet(client, 1, 2, 5.0, {})
