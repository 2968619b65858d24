"""How well a run would shuffle, and what that costs: `python scripts/shuffle_report.py 'shards/{000..099}.tar'`.

in: patterns that name shards, a batch, a block, lanes  ->  out: a table of block sizes, what it means in words, perhaps a plot
Invariant: measured on the plan that a run with these flags follows, and on the labels and sizes of the shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/shuffle_report.py` puts scripts/ there, not the root

from data.checking import Look, check_all, expand_local  # noqa: E402
from data.errors import ShardError  # noqa: E402
from data.index import read_index  # noqa: E402
from data.labels import check_source  # noqa: E402
from data.plan import SHUFFLE_BLOCK, Plan  # noqa: E402
from data.shards import Shard, load_shards  # noqa: E402
from data.shuffling import Quality, Stored, blocks_around, measure  # noqa: E402
from data.telling import align, format_bytes  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402
from scripts.command import add_patterns, end  # noqa: E402

EXAMPLES = """examples:
  python scripts/shuffle_report.py 'shards/{000..099}.tar' -b 1024
  python scripts/shuffle_report.py shards/train --shuffle-block 4096 --lanes 8 --plot shuffle.png
  python scripts/shuffle_report.py shards/train --label json:annotation.label --seed 3

exit status: 0, or 2 if nothing could be measured."""


def read_stored(shards: Sequence[Shard], label: str, workers: int | None) -> Stored:
    """Where every sample is, and its class. Raises ShardError."""
    codes: dict[object, int] = {}
    labels, starts, sizes = [], [], []
    look = Look(label=label, pictures=False, contents=False, keep=True)
    for shard, check in zip(shards, check_all([shard.path for shard in shards], look, num_workers=workers), strict=True):
        offsets = read_index(shard.index_path).astype(np.int64)
        if check.num_samples != shard.num_samples:
            raise ShardError(f"{shard.path}: its index does not fit it: run scripts/index_shards.py --rebuild on it")
        labels += [-1 if one is None else codes.setdefault(one, len(codes)) for one in check.labels]
        starts.append(offsets[:-1])
        sizes.append(np.diff(offsets))
    counts = [shard.num_samples for shard in shards]
    number = np.repeat(np.arange(len(shards)), counts)
    return Stored(number, np.concatenate(starts), np.concatenate(sizes), np.array(labels, np.int64))


def table(qualities: Sequence[Quality], chosen: int) -> list[str]:
    """A row for each block size; the chosen one has a star."""
    rows = [["block", "displacement", "class mix", "classes/batch", "shards/batch", "asked/batch", "read/batch", "window"]]
    for one in qualities:
        rows.append([
            f"{one.block:,}{'*' if one.block == chosen else ' '}", f"{100 * one.displacement:.1f} %", f"{100 * one.mix:.1f} %",
            f"{one.classes:.1f} of {one.ideal_classes:.1f}", f"{one.shards:.1f}", format_bytes(one.batch_bytes),
            format_bytes(one.read_bytes), format_bytes(one.window_bytes),
        ])  # fmt: skip
    return align(rows, "rrrrrrrr")


def explain(qualities: Sequence[Quality], chosen: int, num_samples: int) -> list[str]:
    """What the rows mean for the one who chooses."""
    place = next(i for i, one in enumerate(qualities) if one.block == chosen)
    mine = qualities[place]
    lines = [
        f"Block {chosen:,}: neighbours in a tar end up about {mine.apart:,.0f} samples apart (a full permutation: {num_samples / 3:,.0f}); "
        f"the class mix of a batch is {100 * mine.mix:.1f} % of the ideal. At any time {format_bytes(mine.window_bytes)} of shards are "
        f"being read, which the page cache should hold."
    ]
    for other in [*qualities[max(0, place - 1) : place], *qualities[place + 1 : place + 2]]:
        word = "smaller" if other.block < chosen else "larger"
        gain = 100 * (other.mix - mine.mix)
        mix = f"{'costs' if gain < 0 else 'gives'} {abs(gain):.1f} points of class mix"
        if abs(gain) < 0.5:
            mix = "leaves the class mix as it is"
        lines.append(
            f"A {word} block of {other.block:,} {mix}, keeps neighbours about {other.apart:,.0f} apart, and has a window of "
            f"{format_bytes(other.window_bytes)} ({other.window_bytes / mine.window_bytes:.2g} times as much)."
        )
    if place + 1 == len(qualities):
        lines.append("A larger block changes nothing: all samples are permuted together already.")
    return lines


def plot(path: str, plan: Plan, qualities: Sequence[Quality], chosen: int) -> None:
    """Where samples go, the class mix, and the window, as three panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    position = np.unique(np.linspace(0, plan.num_samples - 1, 4000).astype(np.int64))
    axes[0].scatter(position, plan.locate(position).sample, s=2, linewidths=0)
    lanes = f"{plan.lanes} lane{'s' if plan.lanes > 1 else ''}"
    axes[0].set(title=f"block {chosen:,}, {lanes}", xlabel="place in the stream", ylabel="place in the shards")
    blocks = [one.block for one in qualities]
    axes[1].plot(blocks, [100 * one.mix for one in qualities], "o-")
    axes[1].set(title="class mix of a batch", xlabel="block (samples)", ylabel="% of the ideal", xscale="log", ylim=(0, 105))
    axes[2].plot(blocks, [one.window_bytes / 2**20 for one in qualities], "o-", label="window")
    axes[2].plot(blocks, [one.read_bytes / 2**20 for one in qualities], "s--", label="read per batch")
    axes[2].set(title="what it costs", xlabel="block (samples)", ylabel="MiB", xscale="log", yscale="log")
    axes[2].legend()
    for axis in axes[1:]:
        axis.minorticks_off()
        axis.set_xticks(blocks, [f"{block:,}" for block in blocks], rotation=30)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.axvline(chosen, color="0.6", linestyle=":")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(
    *, patterns: Sequence[str], batch_size: int, shuffle_block: int, lanes: int, seed: int, label: str,
    plot_file: str | None, workers: int | None,
) -> None:  # fmt: skip
    """Print the report. Raises ValueError (ShardError), OSError."""
    check_source(label)
    shards = load_shards(expand_local(patterns), workers)
    counts = np.array([shard.num_samples for shard in shards], np.int64)
    plan = Plan(counts, seed=seed, shuffle_block=shuffle_block, lanes=lanes)
    stored = read_stored(shards, label, workers)
    chosen = min(shuffle_block, plan.num_samples)
    plans = [Plan(counts, seed=seed, shuffle_block=block, lanes=lanes) for block in blocks_around(shuffle_block, plan.num_samples)]
    qualities = [measure(one, stored, batch_size) for one in plans]
    size = format_bytes(float(stored.size.sum()))
    there, cut = f"{len(shards):,} shard{'s' if len(shards) > 1 else ''}", f"{lanes} lane{'s' if lanes > 1 else ''}"
    print(f"{plan.num_samples:,} samples in {there}, {size}; batches of {batch_size:,}, {cut}")
    if (stored.label < 0).all():
        print(f"no sample has a label in {label!r}: the class mix says nothing; give --label")
    print("\n".join(["", *table(qualities, chosen), "", *explain(qualities, chosen, plan.num_samples)]))
    if plot_file is not None:
        plot(plot_file, plan, qualities, chosen)
        print(f"plot: {plot_file}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="shuffle_report.py",
        description="Measure how well samples are shuffled with a block size, what it costs, and what others would give.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_patterns(parser)
    parser.add_argument("-b", "--batch-size", type=integer(1), default=256, metavar="N", help="global batch (default: 256)")
    text = "samples that are permuted together (default: %(default)s)"
    parser.add_argument("--shuffle-block", type=integer(1), default=SHUFFLE_BLOCK, metavar="N", help=text)
    parser.add_argument("--lanes", type=integer(1), default=1, metavar="N", help="as run.py has it (default: 1)")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="as run.py has it (default: 0)")
    parser.add_argument("--label", default="cls", metavar="FIELD", help="where the label is: cls, txt, json:dotted.path (default: cls)")
    parser.add_argument("--plot", dest="plot_file", metavar="FILE", help="also write a plot (.png, .svg, .pdf)")
    parser.add_argument("-j", "--workers", type=integer(1), metavar="N", help="processes (default: one per core)")
    args = parser.parse_args(argv)
    return end("shuffle_report.py", lambda: run(**vars(args)))


if __name__ == "__main__":
    sys.exit(main())
