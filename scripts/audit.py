"""Check who a run consumed: `python scripts/audit.py runs/first` reads the audit that `run.py --audit` wrote.

in: a run folder  ->  out: for every epoch what was seen, distinct, repeated, missed; whether every rank took every step
Invariant: the exit status says what the last line says: 0 exact, 1 not exact, 2 nothing to check.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/audit.py` puts scripts/ there, not the root

from engine.audit import TRAIN, VAL, Auditor, Line, read_groups  # noqa: E402
from engine.flags import Parser  # noqa: E402
from engine.history import HistoryError, read_history  # noqa: E402

EXAMPLES = """examples:
  python scripts/audit.py runs/first
  python scripts/audit.py --batches runs/first > first.txt      # one global batch a line, the same for any number of processes
  diff <(python scripts/audit.py --batches runs/a) <(python scripts/audit.py --batches runs/b)

A sample is bad if bad_samples.jsonl has it. A slot is masked where a batch is padded, past the last epoch, or bad. An epoch that
the run has not finished is open: what is still to come is not missed.
exit status: 0 if exact, 1 if anything is repeated, missed or uneven, 2 if there is nothing to check or it can't be read."""


def print_batch(group: list[Line]) -> None:
    """One line: the samples of a global batch that counted, sorted, and so the same for any number of ranks."""
    rows = ((e, i) for line in group for e, i, valid in zip(line.epoch, line.ids, line.valid, strict=True) if valid)
    samples = sorted([epoch, *sample] for epoch, sample in rows)
    print(json.dumps({"step": group[0].step, "split": VAL if group[0].is_val else TRAIN, "samples": samples}))


def audit(folder: Path, batches: bool) -> int:
    """Check the run in `folder` and print what was found, or its batches; the exit status. Raises HistoryError."""
    history = read_history(folder)
    auditor = Auditor(history)
    under_way = []
    for group, is_last in read_groups(folder):
        if not auditor.take(group, is_last):
            under_way.append(group[0])
        elif batches:
            print_batch(group)
    lines = auditor.finish()
    findings = auditor.findings.lines()
    if not batches:
        print(f"{folder}: {history.num_samples:,} samples in {len(history.shards):,} shards, {auditor.describe_steps()}")
        print("\n".join(lines))
        for line in under_way[-1:]:
            print(f"not counted: step {line.step}, {VAL if line.is_val else TRAIN}: some ranks are still at it, or were killed at it")
        if auditor.places.shared:
            names = ", ".join(auditor.places.shared[:3]) + (", ..." if len(auditor.places.shared) > 3 else "")
            print(f"note: several shards have one file name ({names}); their samples are told apart by index only")
    out = sys.stderr if batches else sys.stdout
    print("\n".join(["not exact:", *(f"  {line}" for line in findings)]) if findings else "exact", file=out)
    return 1 if findings else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="audit.py",
        description="Check from a run's audit that every sample was consumed exactly once an epoch, and by every rank in step.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--batches", action="store_true", help="print the samples of each global batch that counted, one batch a line")
    args = parser.parse_args(argv)
    try:
        return audit(args.run, args.batches)
    except HistoryError as error:
        print(f"audit.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 141


if __name__ == "__main__":
    sys.exit(main())
