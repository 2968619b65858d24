"""What a trained model says of pictures or videos: the most likely classes of each.

    python scripts/predict.py runs/first photo.jpg other.png           pictures (of a model of clips: videos), or folders of them
    python scripts/predict.py runs/first/checkpoints/best.pt 'shards/val/{000..009}.tar' --csv predictions.csv

CHECKPOINT is a .pt file or a run folder (then its best.pt, or last.pt where there is none). Pictures are transformed as in the
run's evaluation; of a video that is one clip, from its middle. What can't be read is named on stderr and left out; the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from data import DataError, load_shards  # noqa: E402
from data.clips import ClipShape, eval_clip  # noqa: E402
from data.decoders import IMAGE_FIELDS  # noqa: E402
from data.errors import printable  # noqa: E402
from data.labels import find_field  # noqa: E402
from data.store import ShardFiles  # noqa: E402
from data.tar import parse_sample  # noqa: E402
from data.tasks import has_clips, has_several_labels  # noqa: E402
from data.transforms import eval_transform  # noqa: E402
from data.video import VIDEO_FIELDS  # noqa: E402
from engine import checkpoint  # noqa: E402
from engine.flags import Parser  # noqa: E402
from engine.forward import normalize  # noqa: E402
from engine.settings import model_options  # noqa: E402
from models import create_model  # noqa: E402

SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")


class Prediction(NamedTuple):
    """The classes of one picture, most likely first, each with its probability in 0..1."""

    name: str
    classes: list[tuple[str, float]]


def read_inputs(inputs: Sequence[str], endings: Sequence[str] = IMAGE_FIELDS) -> Iterator[tuple[str, bytes | DataError]]:
    """(name, encoded picture or video) of every input in turn: files, folders of them, shard patterns."""
    for text in inputs:
        path = Path(text)
        if path.is_file() and not text.endswith(SHARD_ENDINGS):
            yield text, path.read_bytes()
        elif path.is_dir() and (found := sorted(p for p in path.rglob("*") if p.suffix.lower().lstrip(".") in endings)):
            for picture in found:
                yield str(picture), picture.read_bytes()
        elif text.lower().endswith(tuple(endings)):
            raise ValueError(f"{text}: there is no such {'picture' if endings is IMAGE_FIELDS else 'video'}")
        else:
            yield from read_shards(text, endings)


def read_shards(pattern: str, names: Sequence[str]) -> Iterator[tuple[str, bytes | DataError]]:
    """(shard name/key, encoded picture) of every sample."""
    files = ShardFiles()
    for shard in load_shards(pattern):
        for index in range(shard.num_samples):
            data, offset = files.read(shard, index)
            key = str(index)
            try:
                key, fields = parse_sample(data, offset, shard.name)
                yield f"{shard.name}/{key}", fields[find_field(fields, names, "picture" if names is IMAGE_FIELDS else "video")]
            except DataError as error:
                yield f"{shard.name}/{error.key or key}", error


class Predictor:
    """A checkpoint's model on a device."""

    def __init__(self, path: Path, device: str, top: int) -> None:
        if not path.exists():
            raise ValueError(f"{path}: there is no such checkpoint; give a .pt file or a run folder")
        best = path / "checkpoints" / checkpoint.BEST
        saved, self.path, warning = checkpoint.load(best if best.is_file() else path)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
        flags = saved["flags"]
        self.img_size, self.device = flags["img_size"], torch.device(device)
        self.names = saved["class_names"] or [str(number) for number in range(flags["num_classes"])]
        self.top = min(top, len(self.names))
        self.several = has_several_labels(flags["task"])
        self.clip: ClipShape | None = None
        if has_clips(flags["task"]):
            self.clip = ClipShape(flags["num_frames"], flags["sampling_rate"], flags["target_fps"], self.img_size)
        self.endings = IMAGE_FIELDS if self.clip is None else VIDEO_FIELDS
        options = model_options(flags.get("model_kwargs"))
        self.model = create_model(flags["model"], flags["num_classes"], self.img_size, **options).to(self.device).eval()
        weights = saved.get("ema") or saved["model"]
        checkpoint.check_weights(self.path, weights, self.model)
        self.model.load_state_dict(weights)

    def transform(self, data: bytes) -> torch.Tensor:
        """The evaluation's view of a picture or video. Raises DataError."""
        return eval_transform(data, self.img_size) if self.clip is None else eval_clip(data, self.clip)

    @torch.inference_mode()
    def predict(self, pictures: Sequence[tuple[str, torch.Tensor]]) -> list[Prediction]:
        """The most likely classes of transformed pictures, uint8 (3, img_size, img_size), or clips, (3, T, img_size, img_size)."""
        images = torch.stack([image for _, image in pictures]).to(self.device)
        logits = self.model(normalize(images)).float()
        shares, classes = (logits.sigmoid() if self.several else logits.softmax(1)).topk(self.top)
        rows = zip(pictures, classes.tolist(), shares.tolist(), strict=True)
        return [Prediction(name, [(self.names[c], s) for c, s in zip(cs, ss, strict=True)]) for (name, _), cs, ss in rows]


def predict_all(
    predictor: Predictor, inputs: Iterable[tuple[str, bytes | DataError]], batch_size: int, left_out: list[str]
) -> Iterator[Prediction]:
    """Predictions in the order of the inputs; what can't be decoded goes to left_out."""

    def decoded() -> Iterator[tuple[str, torch.Tensor]]:
        for name, data in inputs:
            try:
                if isinstance(data, DataError):
                    raise data
                yield name, predictor.transform(data)
            except DataError as error:
                left_out.append(name)
                print(printable(f"left out: {name}: {error}"), file=sys.stderr)

    stream = decoded()
    while batch := list(itertools.islice(stream, batch_size)):
        yield from predictor.predict(batch)


def write_csv(file: TextIO, predictions: Iterable[Prediction], top: int) -> int:
    writer: Any = csv.writer(file)
    writer.writerow(["picture", *itertools.chain.from_iterable((f"class{n}", f"probability{n}") for n in range(1, top + 1))])
    count = 0
    for prediction in predictions:
        count += 1
        writer.writerow([prediction.name, *itertools.chain.from_iterable((c, f"{s:.6f}") for c, s in prediction.classes)])
    return count


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("inputs", metavar="PICTURE|PATTERN", nargs="+")
    parser.add_argument("--csv", metavar="FILE", help="write all to a CSV file (- for the terminal) in place of a list")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes per picture (default: 5)")
    parser.add_argument("-b", "--batch-size", type=int, default=64, metavar="N", help="pictures at a time (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda if there is a GPU")
    args = parser.parse_args()
    left_out: list[str] = []
    try:
        if args.top < 1 or args.batch_size < 1:
            raise ValueError(f"--top {args.top} and --batch-size {args.batch_size} must be at least 1")
        predictor = Predictor(args.checkpoint, args.device, args.top)
        predictions = predict_all(predictor, read_inputs(args.inputs, predictor.endings), args.batch_size, left_out)
        if args.csv is None:
            for prediction in predictions:
                print(printable(prediction.name))
                for name, share in prediction.classes:
                    print(f"  {100 * share:6.2f} %  {printable(name)}")
        else:
            with open(os.dup(1) if args.csv == "-" else args.csv, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
                count = write_csv(file, predictions, predictor.top)
            print(f"{count:,} pictures, {len(left_out):,} left out: {args.csv}", file=sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 141
    except (ValueError, OSError) as error:
        print(f"predict.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
