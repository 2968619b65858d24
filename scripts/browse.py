"""A page on this machine to look into shards and runs: `python scripts/browse.py 'shards/{000..099}.tar' --runs runs/`.

in: patterns that name shards, a folder of runs  ->  out: http://127.0.0.1:PORT until Ctrl-C
Invariant: only this machine can reach it, and it only reads (what it may write is a missing index beside a shard, as run.py does).
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python scripts/browse.py` puts scripts/ there, not the root

from data.checking import Look, check_all, expand_local  # noqa: E402
from data.errors import ShardError  # noqa: E402
from data.labels import check_source  # noqa: E402
from data.shards import load_shards, read_dataset_json  # noqa: E402
from engine.flags import Parser, integer  # noqa: E402
from scripts.command import add_patterns, end  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image
    from werkzeug.serving import BaseWSGIServer

    from browser.app import Draw
    from browser.library import ShardSet

EXAMPLES = """examples:
  python scripts/browse.py 'shards/{000..099}.tar'
  python scripts/browse.py shards/train --runs runs/             # and the curves of the runs, with links to their bad samples
  python scripts/browse.py --runs runs/ --port 8000
  ssh -L 8765:127.0.0.1:8765 HOST                                 # then open http://127.0.0.1:8765 here for a browse.py that runs there

Shards are checked in the background (fields, labels, headers of pictures; every pixel with --decode); pages are there at once.
exit status: 0 after Ctrl-C, 2 if it can't start."""

PORT = 8765
TASK = "image-classification"


def create_draw(task: str, label: str, img_size: int | None, seed: int) -> Draw:
    """A function that draws what the model is shown of a sample. The task is made when it is first asked for: torch takes seconds."""
    made: dict[int, Any] = {}
    lock = threading.Lock()

    def draw(shards: ShardSet, number: int, epochs: range) -> list[Image]:
        import numpy as np

        from data.plan import Plan
        from data.tasks import create_task, default_img_size, resolve_labels
        from data.viewing import model_views, read_fields

        with lock:
            if id(shards) not in made:
                labels = resolve_labels(shards.shards, label)
                size = default_img_size(shards.shards, task) if img_size is None else img_size
                plan = Plan(np.array([shard.num_samples for shard in shards.shards], np.int64), seed=seed)
                made[id(shards)] = create_task(task, training=True, labels=labels, img_size=size), plan
        made_task, plan = made[id(shards)]
        return model_views(made_task, plan, number, read_fields(shards.view(number)), epochs)

    return draw


def start(
    *, patterns: Sequence[str], runs: Path | None, port: int, task: str, label: str, img_size: int | None, seed: int, decode: bool,
    workers: int | None,
) -> BaseWSGIServer:  # fmt: skip
    """A server that is ready to `serve_forever`. Raises ValueError (ShardError), OSError."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    from browser.app import Site, create_app
    from browser.library import ShardSet

    check_source(label)
    if task != TASK:
        from data.tasks import settings_of  # torch: seconds

        settings_of(task)
    if not patterns and runs is None:
        raise ShardError("give a pattern that names shards, or --runs FOLDER")
    if runs is not None and not runs.is_dir():
        raise ShardError(f"--runs {runs}: no such folder; run.py makes runs/")
    site = Site(runs=runs, draw=create_draw(task, label, img_size, seed), label=label)
    if patterns:
        shards = load_shards(expand_local(patterns), workers)
        names = (read_dataset_json(shards) or {}).get("classes") or ()
        site.given = ShardSet(shards, names)
        look = Look(label=label, decode=decode, contents=False, keep=True)
        # processes are forked here, before there are threads, and the pages don't share their interpreter with a check
        checks = check_all([shard.path for shard in shards], look, num_workers=workers, progress=False, apart=True)
        site.given.checking = True
        threading.Thread(target=site.given.follow, args=(checks,), daemon=True).start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every thumbnail
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    return make_server("127.0.0.1", port, create_app(site), threaded=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="browse.py",
        description="Serve a page, to this machine only, to look into shards and runs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_patterns(parser, nargs="*")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="a folder with runs, as run.py's --output")
    parser.add_argument("--port", type=integer(0, 65535), default=PORT, metavar="N", help=f"port (default: {PORT}; 0: any free one)")
    text = "whose training views are drawn (default: %(default)s)"
    parser.add_argument("--task", default=TASK, metavar="NAME", help=text)
    parser.add_argument("--label", default="cls", metavar="FIELD", help="where the label is: cls, txt, json:dotted.path (default: cls)")
    parser.add_argument("--img-size", type=integer(1), metavar="N", help="side of the model's pictures (default: as run.py chooses)")
    text = "the run's --seed: training views are that run's (default: 0)"
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help=text)
    parser.add_argument("--decode", action="store_true", help="decode every picture while checking, not only its header")
    parser.add_argument("-j", "--workers", type=integer(1), metavar="N", help="processes that check (default: one per core)")
    args = parser.parse_args(argv)
    return end("browse.py", lambda: serve(**vars(args)))


def serve(*, port: int, **what: Any) -> None:
    """Serve until Ctrl-C. Raises ValueError (ShardError), OSError."""
    try:
        server = start(port=port, **what)
    except SystemExit:  # of werkzeug, where the port is taken
        raise ValueError(f"port {port}: in use: give another, or --port 0") from None
    print(f"http://127.0.0.1:{server.port}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
