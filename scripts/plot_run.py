"""One picture of one or more runs: loss, top-1, throughput, waiting for data, run beside run.

    python scripts/plot_run.py runs/first                              writes runs/first/plot.png
    python scripts/plot_run.py runs/first runs/second -o both.png

The horizontal axis is epochs (samples seen / samples of an epoch), so runs of other batch sizes lie beside each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.flags import Parser  # noqa: E402
from engine.history import HistoryError, read_objects  # noqa: E402

# title, unit, what is drawn of which event: (event, field, factor, line style)
PANELS: list[tuple[str, str, list[tuple[str, str, float, str]]]] = [
    ("loss (evaluation dashed)", "", [("train", "loss", 1.0, "-"), ("eval", "loss", 1.0, "--")]),
    ("top-1 (evaluation dashed)", "%", [("epoch", "top1", 100.0, "-"), ("eval", "top1", 100.0, "--")]),
    ("throughput", "samples/s", [("train", "samples_per_second", 1.0, "-")]),
    ("waiting for data", "% of the time", [("train", "data_wait", 100.0, "-")]),
]


def read_run(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """event -> its lines, each with "x", the epochs done by then. Raises HistoryError."""
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "epoch": [], "eval": []}
    num_samples = 0
    for _, line in read_objects(folder / "metrics.jsonl"):
        event = line.get("event")
        if event == "start":
            num_samples = line["num_samples"]
        elif event in lines:
            x = line["samples_seen"] / num_samples if event == "train" else line["epoch"] + 1
            if event == "train":
                line["data_wait"] = line["data_time"] / line["step_time"]
            lines[event].append({**line, "x": x})
    if not any(lines.values()):
        raise HistoryError(f"{folder}: it has told nothing yet; a run does every --log-interval steps")
    return lines


def plot(folders: Sequence[Path], output: Path) -> None:
    """Write the PNG. Raises HistoryError."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    runs = {folder: read_run(folder) for folder in folders}
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for (title, unit, curves), axis in zip(PANELS, axes.flat, strict=True):
        for number, (folder, lines) in enumerate(runs.items()):
            for event, field, factor, style in curves:
                points = [(line["x"], line[field] * factor) for line in lines[event] if line.get(field) is not None]
                if points:
                    label = folder.resolve().name if style == "-" else None
                    # a curve of one point would not be seen
                    marker = "." if len(points) < 30 else None
                    axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label, marker=marker)
        axis.set(title=title, xlabel="epoch", ylabel=unit)
        axis.grid(alpha=0.3)
        if title in ("throughput", "waiting for data"):
            axis.set_ylim(bottom=0)
    axes[0, 0].legend()
    figure.savefig(output, dpi=100)
    pyplot.close(figure)


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run folders")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the PNG to write (default: plot.png in the first run's folder)")
    args = parser.parse_args()
    output = args.output or args.runs[0] / "plot.png"
    try:
        plot(args.runs, output)
    except (HistoryError, OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason: object = error
        if isinstance(error, KeyError):
            reason = f"metrics.jsonl: a line lacks {error}: not written by run.py?"
        elif not isinstance(error, (HistoryError, OSError)):
            reason = f"metrics.jsonl: a value is not a number ({error}): not written by run.py?"
        print(f"plot_run.py: error: {' '.join(str(reason).split())}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
