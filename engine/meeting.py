"""How the ranks of one start find each other, at a key-value store that may be older than they are.

in: a store that all reach, what this rank has to tell  ->  out: a part of the store that is this start's own; what every rank told
Invariant: nothing that an earlier start left in the store counts. torchrun keeps one store over its restarts, and a file outlives its run.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import torch.distributed as dist

from .launcher import Stopped

PAUSE = 0.05  # seconds between two looks at the store


def meet(store: dist.Store, rank: int, world_size: int, seconds: float, told: dict[str, Any]) -> tuple[dist.Store, list[dict[str, Any]]]:
    """Return when every rank has called this; told: plain values, as JSON has them. Every rank gets what each one told, by rank.

    Rank 0 opens a room under a name that was never used, and closes it with the list of the cards it has got. Others may first find
    the room of an earlier start, and leave a card there: no list will have it. Raises Stopped that names who did not come.
    """
    card = {**told, "token": uuid.uuid4().hex}
    try:
        store.set(f"here/{rank}", "")  # for a message where rank 0 is missing; it may be an earlier start's
        if rank == 0:
            return _invite(store, world_size, seconds, card)
        return _come(store, rank, world_size, seconds, card)
    except dist.DistError as error:
        raise Stopped(f"rank 0 has left, and the store with it: see what it said ({' '.join(str(error).split())[:200]})") from None


def _invite(store: dist.Store, world_size: int, seconds: float, card: dict[str, Any]) -> tuple[dist.Store, list[dict[str, Any]]]:
    name = uuid.uuid4().hex
    room = dist.PrefixStore(name, store)
    room.set("0", json.dumps(card))
    store.set("room", name)
    seats = [str(rank) for rank in range(world_size)]
    end = time.monotonic() + seconds
    while not room.check(seats) and time.monotonic() < end:
        time.sleep(PAUSE)
    cards: list[dict[str, Any] | None] = [json.loads(room.get(seat)) if room.check([seat]) else None for seat in seats]
    room.set("cards", json.dumps(cards))
    come = [one for one in cards if one]
    if len(come) < world_size:
        time.sleep(20 * PAUSE)  # so that the others read it before the store goes with this process
        raise Stopped(_missing(cards, seconds))
    return room, come


def _come(store: dist.Store, rank: int, world_size: int, seconds: float, card: dict[str, Any]) -> tuple[dist.Store, list[dict[str, Any]]]:
    end = time.monotonic() + seconds + 40 * PAUSE  # rank 0 decides, if it is there
    name, room, is_old = "", dist.PrefixStore("", store), True
    while time.monotonic() < end:
        if store.check(["room"]) and (now := store.get("room").decode()) != name:
            name, room, is_old = now, dist.PrefixStore(now, store), False
            room.set(str(rank), json.dumps(card))
        if not is_old and room.check(["cards"]):
            cards: list[dict[str, Any] | None] = json.loads(room.get("cards"))
            is_old = rank >= len(cards) or cards[rank] != card
            if not is_old:
                come = [one for one in cards if one]
                if len(come) < len(cards):
                    raise Stopped(_missing(cards, seconds))
                return room, come
        time.sleep(PAUSE)
    raise Stopped(_missing([None, *(store.check([f"here/{other}"]) or None for other in range(1, world_size))], seconds))


def _missing(come: list[Any], seconds: float) -> str:
    ranks = [rank for rank, one in enumerate(come) if one is None]
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {names} of {len(come)} did not come up within {seconds:g} s (--dist-timeout): "
        "see what they said; all machines need the same --nnodes, --nproc-per-node and --dist-url"
    )
