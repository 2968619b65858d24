"""handshake.py over real ranks: whoever means another run is named, in seconds, with what differs."""

from __future__ import annotations

import pytest
from gloo_pool import RankFailed

from data import Shard
from engine import distributed
from engine.handshake import check_same


def shard(name, samples=10, size=10_240):
    return Shard(f"/data/{name}", name, f"/data/{name}", f"/data/{name}.idx", samples, size)


def meet(rank, port, world_size, facts, shards):
    """One rank: join, compare, leave; facts and shards are each rank's own."""
    ranks = distributed.start(rank, nproc=world_size, store_port=port)
    try:
        check_same(ranks, facts[rank], shards[rank])
    finally:
        distributed.shut_down()


def compare(pool, facts, shards=None):
    store, port = distributed.host_store()
    pool.run(len(facts), meet, port, len(facts), facts, shards or [{}] * len(facts))
    del store


def test_equal_ranks_pass(gloo_pool):
    compare(gloo_pool, [{"--lr": 0.1, "--seed": 3}] * 3)


def test_a_flag_that_differs_is_named_with_both_values(gloo_pool):
    with pytest.raises(RankFailed) as raised:
        compare(gloo_pool, [{"--lr": 0.1}, {"--lr": 0.1}, {"--lr": 0.2}])
    text = str(raised.value)
    assert text.count("the ranks don't mean the same run: --lr is 0.2 on rank 2 (") == 3  # every rank says the same
    assert "and 0.1 on rank 0 (" in text and "give every machine the same flags and the same shards" in text


def test_a_shard_that_differs_is_named(gloo_pool):
    lists = [{"shards": [shard("000.tar"), shard("001.tar", 9)]}, {"shards": [shard("000.tar"), shard("001.tar", 8, 20_480)]}]
    facts = [{"shards": {"samples": 19}}, {"shards": {"samples": 18}}]
    named = r"shards 1 is 001.tar \(8 samples, 20480 bytes\) on rank 1 .* and 001.tar \(9 samples, 10240 bytes\)"
    with pytest.raises(RankFailed, match=named):
        compare(gloo_pool, facts, lists)


def test_a_rank_that_does_not_come_is_named():
    store, port = distributed.host_store()
    with pytest.raises(Exception) as raised:
        distributed.start(1, nproc=4, store_port=port, seconds=1.5)
    del store
    assert str(raised.value).startswith("ranks 0, 2, 3 of 4 did not come up within 1.5 s (--dist-timeout): see what they said")


def test_a_rank_0_that_does_not_come_is_named():
    with pytest.raises(Exception) as raised:
        distributed.start(1, nproc=2, dist_url="tcp://127.0.0.1:9", seconds=1.5)
    assert str(raised.value).startswith("rank 0 can't be reached at tcp://127.0.0.1:9 within 1.5 s (--dist-timeout): is its machine")
