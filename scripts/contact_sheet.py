"""One picture of many samples: `python scripts/contact_sheet.py 'shards/{000..099}.tar' sheet.png`.

in: patterns that name shards  ->  out: a PNG with a tile for each of some samples, its key and label below it
Invariant: the same shards and flags give the same picture. What can't be shown has a tile that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/contact_sheet.py` puts scripts/ there, not the root

from data.errors import DataError, ShardError, printable  # noqa: E402
from data.labels import check_source, read_label  # noqa: E402
from data.plan import Plan  # noqa: E402
from data.shards import Shard, load_shards, read_dataset_json  # noqa: E402
from data.viewing import SampleView, enlarged, model_views, poster, read_field, read_fields, view_samples  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402
from scripts.command import add_patterns, end  # noqa: E402

EXAMPLES = """examples:
  python scripts/contact_sheet.py 'shards/{000..099}.tar' sheet.png
  python scripts/contact_sheet.py shards/train sheet.png --num 60 --columns 10 --seed 1        # drawn at random
  python scripts/contact_sheet.py shards/train sheet.png --augmented --seed 0 --epoch 3         # as that epoch of a run shows them

Without --seed the samples stand at even distances. exit status: 0, or 2 if no picture could be made."""

MAX_PIXELS = 100_000_000
PAPER, INK, FAINT, WRONG, TILE = (250, 250, 248), (32, 33, 36), (110, 113, 120), (176, 32, 32), (233, 233, 230)


def choose(num_samples: int, count: int, seed: int | None) -> list[int]:
    """The numbers of the samples to show, ascending."""
    count = min(count, num_samples)
    if seed is None:
        return [(2 * i + 1) * num_samples // (2 * count) for i in range(count)]
    return sorted(np.random.default_rng(seed).choice(num_samples, count, replace=False).tolist())


def find_views(shards: Sequence[Shard], numbers: Sequence[int]) -> Iterator[SampleView]:
    """The samples of these numbers in index order."""
    ends = np.cumsum([shard.num_samples for shard in shards])
    for number in numbers:
        place = int(np.searchsorted(ends, number, side="right"))
        yield view_samples(shards[place], number - int(ends[place]) + shards[place].num_samples, 1)[0]


def label_of(view: SampleView, source: str, names: Sequence[str]) -> str:
    """The label of a sample in words; empty where it has none."""
    field = view.find(source.partition(":")[0])
    if field is None:
        return ""
    try:
        label = read_label(source, read_field(view, field))
    except DataError:
        return "?"
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else str(label)


def draw_sheet(tiles: Sequence[tuple[Image.Image | str, str, str]], columns: int, side: int) -> Image.Image:
    """tiles: (a picture, or why there is none; key; label). Raises ValueError for too large a sheet."""
    gap, line = max(6, side // 16), max(11, side // 11)
    font = ImageFont.load_default(line)
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = side + gap, side + gap + 2 * (line + 3)
    if (columns * width + gap) * (rows * height + gap) > MAX_PIXELS:
        raise ValueError(f"{len(tiles):,} tiles of {side} pixels make over {MAX_PIXELS:,} pixels: give a smaller --num or --side")
    sheet = Image.new("RGB", (columns * width + gap, rows * height + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, (content, key, label) in enumerate(tiles):
        x, y = gap + i % columns * width, gap + i // columns * height
        draw.rectangle((x, y, x + side - 1, y + side - 1), TILE)
        if isinstance(content, str):
            draw.multiline_text((x + 6, y + 6), wrapped(draw, content, font, side - 12), WRONG, font)
        else:
            sheet.paste(content, (x + (side - content.width) // 2, y + (side - content.height) // 2))
        draw.text((x, y + side + 2), fitting(draw, label or key, font, side), INK, font)
        if label:
            draw.text((x, y + side + line + 5), fitting(draw, key, font, side), FAINT, font)
    return sheet


def fitting(draw: ImageDraw.ImageDraw, text: str, font: Any, width: int) -> str:
    """A text cut so that it fits; its end is what tells keys apart."""
    text = printable(text)
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength("…" + text, font) > width:
        text = text[1:]
    return "…" + text


def wrapped(draw: ImageDraw.ImageDraw, text: str, font: Any, width: int) -> str:
    """A text in lines that fit, six at most."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if draw.textlength(longer, font) <= width:
            lines[-1] = longer
        else:
            lines.append(word[:40])
    return "\n".join(lines[:6])


def augmenter(shards: Sequence[Shard], task: str, label: str, img_size: int | None, seed: int, epoch: int) -> Callable[..., Image.Image]:
    """A function of (view, number of the sample) that gives what the model is shown in `epoch` of a run with this seed."""
    from data.tasks import create_task, default_img_size, resolve_labels  # torch: seconds

    labels = resolve_labels(shards, label)
    made = create_task(task, training=True, labels=labels, img_size=default_img_size(shards, task) if img_size is None else img_size)
    plan = Plan(np.array([shard.num_samples for shard in shards], np.int64), seed=seed)
    return lambda view, number: model_views(made, plan, number, read_fields(view), range(epoch, epoch + 1))[0]


def make_tile(view: SampleView, side: int, show: Callable[[], Image.Image | None]) -> Image.Image | str:
    """A sample's picture at most side x side, or why there is none."""
    try:
        image = show()
    except DataError as error:
        return str(error)
    if image is None:
        return "no picture: " + ", ".join(field.name for field in view.fields)
    image = enlarged(image, side)
    image.thumbnail((side, side))
    return image


def run(
    *, patterns: Sequence[str], out: Path, num: int, columns: int, side: int, seed: int | None,
    augmented: bool, epoch: int, task: str, label: str, img_size: int | None,
) -> None:  # fmt: skip
    """Write the sheet. Raises ShardError, OSError, ValueError for a task that is unknown."""
    check_source(label)
    shards = load_shards(patterns)
    total = sum(shard.num_samples for shard in shards)
    if not total:
        raise ShardError("the shards hold no samples: give shards that do")
    names = (read_dataset_json(shards) or {}).get("classes") or ()
    augment = augmenter(shards, task, label, img_size, seed or 0, epoch) if augmented else None
    tiles: list[tuple[Image.Image | str, str, str]] = []
    numbers = choose(total, num, seed)
    for number, view in zip(tqdm(numbers, desc="pictures", delay=2, leave=False), find_views(shards, numbers), strict=True):
        show = partial(poster, view, side) if augment is None else partial(augment, view, number)
        tiles.append((make_tile(view, side, show), view.key, label_of(view, label, names)))
    sheet = draw_sheet(tiles, columns, side)
    sheet.save(out, "PNG", optimize=True)
    print(f"{out}: {len(tiles)} of {total:,} samples, {sheet.width} x {sheet.height} pixels")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="contact_sheet.py",
        description="Make one picture of some samples, with their keys and labels.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_patterns(parser, urls=True)
    parser.add_argument("out", type=Path, metavar="OUT.png", help="the picture to write")
    parser.add_argument("--num", type=integer(1, 10_000), default=24, metavar="N", help="samples to show (default: 24)")
    parser.add_argument("--columns", type=integer(1), default=8, metavar="N", help="tiles in a row (default: 8)")
    parser.add_argument("--side", type=integer(32, 1024), default=128, metavar="PIXELS", help="side of a tile (default: 128)")
    parser.add_argument("--seed", type=integer(0), metavar="N", help="draw the samples at random; with --augmented, also the run's --seed")
    parser.add_argument("--augmented", action="store_true", help="as a training run shows them to the model")
    parser.add_argument("--epoch", type=integer(0), default=0, metavar="E", help="of which epoch, with --augmented (default: 0)")
    parser.add_argument("--task", default="image-classification", metavar="NAME", help="what a sample is (default: %(default)s)")
    parser.add_argument("--label", default="cls", metavar="FIELD", help="where the label is: cls, txt, json:dotted.path (default: cls)")
    parser.add_argument("--img-size", type=integer(1), metavar="N", help="side of the model's pictures (default: as run.py chooses)")
    args = parser.parse_args(argv)
    return end("contact_sheet.py", lambda: run(**vars(args)))


if __name__ == "__main__":
    sys.exit(main())
