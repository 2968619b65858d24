"""What limits a run, in a sentence: who waits for whom, and the cheapest change.

in: the totals of every rank (engine/waits.py), and what the run is like  ->  out: Verdict
Invariant: PURE: the sentence follows from its arguments alone. A rank is named only where it is slower than the others by more than chance
explains, and for no more than it costs them: a wrong accusation is worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.timing import COLLATE, DECODE, HAND_OVER, READ, STAGES, TRANSFORM, WORK

from .waits import BACKWARD, COUNT, DATA, FORWARD, TRANSFER, UPDATE, Totals

FEWEST = 4  # steps that a judgement needs
WORTH_SAYING = 0.05  # a share of the time below which nobody waits for data
ACCUSING = 0.1  # a share of the others' time below which no rank is named, nor the meeting of all
SURE = 3.0  # times the error of a mean that a rank must be slower than the others

WORDS = {
    READ: "reading takes", STAGES: "your own stages take", DECODE: "decoding takes", TRANSFORM: "cropping and resizing takes",
    COLLATE: "putting batches together takes", HAND_OVER: "handing batches over takes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is like. cores: that each process has for itself. smaller: flags of make_shards.py that make samples cheaper to decode,
    empty where none would."""

    num_workers: int
    cores: int
    device: str = "cpu"
    smaller: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a run. limit: "data", "rank", "meeting", "model", or "unknown"; rank: which one; what: the loader's or the trainer's
    part; share: of the time that is lost by it."""

    limit: str
    rank: int
    what: str
    share: float
    sentence: str


def judge(ranks: Sequence[Totals], setting: Setting) -> Verdict:
    """What limits these ranks: one that the others wait for comes first, then data, then their meeting in each step, then the model."""
    steps = min(totals.steps for totals in ranks)
    if steps < FEWEST:
        return Verdict("unknown", 0, "", 0.0, f"what limits is not told: {steps or 'no'} step{'s' * (steps != 1)} after the start-up")
    slow = max(range(len(ranks)), key=lambda rank: ranks[rank].own)
    lost = [_lost(totals, ranks[slow], ranks) for rank, totals in enumerate(ranks) if rank != slow]
    waited = sum(lost) / len(lost) if lost else 0.0
    if waited >= ACCUSING and _is_slower(ranks[slow], _usual(ranks)):
        if _beyond(ranks, slow, DATA) > _beyond(ranks, slow, FORWARD) + _beyond(ranks, slow, TRANSFER):
            return _blame_data(ranks, slow, True, setting)
        return _blame_rank(ranks, slow, waited, setting)
    late = max(range(len(ranks)), key=lambda rank: ranks[rank].share(DATA))
    if ranks[late].share(DATA) >= WORTH_SAYING:
        usual = sorted(totals.share(DATA) for totals in ranks)[(len(ranks) - 1) // 2]
        return _blame_data(ranks, late, 2 * usual < ranks[late].share(DATA), setting)
    met = sum(totals.share(COUNT) for totals in ranks) / len(ranks)
    if met >= ACCUSING and len(ranks) > 1:
        return _blame_meeting(ranks, met)
    return _blame_model(ranks, late, setting)


def _usual(ranks: Sequence[Totals]) -> Totals:
    """The rank in the middle, by what it takes for itself."""
    return sorted(ranks, key=lambda totals: totals.own)[(len(ranks) - 1) // 2]


def _is_slower(slow: Totals, usual: Totals) -> bool:
    """More than a tenth, and more than chance explains."""
    return slow.own > 1.1 * usual.own and slow.own - usual.own > SURE * (slow.own_variance + usual.own_variance) ** 0.5


def _lost(totals: Totals, slow: Totals, ranks: Sequence[Totals]) -> float:
    """The share of a rank's time that it loses to a slower one: what that takes longer, if it waited as long somewhere.

    It waits until all ranks are as far, or in its backward, for the gradients of the slow one: what that takes longer than the fastest.
    """
    least = min(one.trainer.get(BACKWARD, 0.0) for one in ranks)
    waited = totals.trainer.get(COUNT, 0.0) + totals.trainer.get(BACKWARD, 0.0) - least
    return max(0.0, min(waited, (slow.own - totals.own) * totals.steps)) / (totals.seconds or 1.0)


def _beyond(ranks: Sequence[Totals], rank: int, name: str) -> float:
    """Seconds that a rank spends on something beyond what is usual."""
    spent = [totals.trainer.get(name, 0.0) for totals in ranks]
    return spent[rank] - sorted(spent)[(len(spent) - 1) // 2]


def _blame_rank(ranks: Sequence[Totals], slow: int, waited: float, setting: Setting) -> Verdict:
    who = "the other GPUs" if setting.device == "cuda" else "the other ranks"
    if len(ranks) == 2:
        who = f"rank {1 - slow}"
    sentence = (
        f"{who} {'waits' if len(ranks) == 2 else 'wait'} {_percent(waited)} of the time for rank {slow}: until its backward it takes "
        f"{_time(ranks[slow].own)} a step, and others {_time(_usual(ranks).own)}; look at what else runs on its machine"
    )
    return Verdict("rank", slow, FORWARD, waited, sentence)


def _blame_data(ranks: Sequence[Totals], late: int, alone: bool, setting: Setting) -> Verdict:
    """alone: the other ranks have their data in time."""
    loader, share, num_workers = ranks[late].loader, ranks[late].share(DATA), setting.num_workers
    work = {name: loader.get(name, 0.0) for name in WORK}
    total = sum(work.values()) or 1.0
    what = max(work, key=lambda name: work[name])
    one, many = ("the GPU waits", "GPUs wait") if setting.device == "cuda" else ("the trainer waits", "the ranks wait")
    who = one if len(ranks) == 1 else f"rank {late} waits" if alone else many
    more = min(setting.cores, max(num_workers + 1, round(num_workers / max(0.1, 1 - share))))
    sentence = (
        f"{who} {_percent(share)} of the time for data: {WORDS[what]} {_percent(work[what] / total)} of worker time; "
        f"{_advice(what, more, alone, setting)}"
    )
    return Verdict("data", late, what, share, sentence)


def _advice(what: str, more: int, alone: bool, setting: Setting) -> str:
    raise_workers = f"raise -j from {setting.num_workers} to {more}" if more > setting.num_workers else ""
    if what == READ:
        where = "that machine's disk" if alone else "the disk"
        change = f"{where} is slow: copy the shards to a faster one, or use a smaller --shuffle-block, so that neighbours are read together"
        return f"{change}; {raise_workers} to have more reads under way" if raise_workers else change
    change = "use a smaller --img-size"
    if what == STAGES:
        change = "make them faster"
    elif what in (DECODE, TRANSFORM) and setting.smaller:
        change = f"if pictures are larger than that, make smaller ones (make_shards.py {setting.smaller})"
    return f"{raise_workers}, or {change}" if raise_workers else f"all cores have a worker: {change}"


def _blame_meeting(ranks: Sequence[Totals], met: float) -> Verdict:
    took = sum(totals.seconds / totals.steps for totals in ranks) / len(ranks)
    sentence = (
        f"the ranks meet in every step, which takes {_percent(met)} of the time, and no one is late each time: a step takes {_time(took)}; "
        "a larger -b has them meet less often"
    )
    return Verdict("meeting", 0, COUNT, met, sentence)


def _blame_model(ranks: Sequence[Totals], late: int, setting: Setting) -> Verdict:
    total = sum(totals.seconds for totals in ranks) or 1.0
    busy = sum(totals.trainer.get(name, 0.0) for totals in ranks for name in (FORWARD, BACKWARD, UPDATE)) / total
    sentence = (
        f"the model limits: forward, backward and update take {_percent(busy)} of the time, data is waited for "
        f"{_percent(ranks[late].share(DATA))}; {'--amp bf16' if setting.device == 'cuda' else 'more cores or a GPU'} or a smaller model "
        "would be faster, more workers would not"
    )
    return Verdict("model", late, BACKWARD, busy, sentence)


def smaller_shards(img_size: int, clips: bool) -> str:
    """The flags of make_shards.py that make samples no larger than a model of this size has use for: an eighth is left for crops."""
    side = img_size if img_size <= 64 else -(-img_size * 8 // 7 // 8) * 8
    return f"--resize{'-video' if clips else ''} {side}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.0095 else 1}f} ms"
