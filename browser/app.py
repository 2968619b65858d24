"""The web application: its routes, and what no request may do.

in: a ShardSet, perhaps a folder of runs, a function that draws training views  ->  out: a Flask application
Invariant: GET only, for this machine's own names only (a page elsewhere can't reach it by a name that resolves to 127.0.0.1); each answer
says that nothing but this server's own files may be loaded or run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flask import Flask, Response, abort, g, redirect, render_template, request, send_file, url_for
from PIL.Image import Image
from werkzeug.exceptions import HTTPException

from data.errors import DataError, ShardError, printable
from data.shards import load_shards
from data.telling import format_bytes
from data.verdict import judge_shard
from data.viewing import SampleView, enlarged, poster, read_field, thumbnail

from . import charts, run_pages
from .contents import PLAYED, encode_picture, kind_of, show
from .library import ShardSet

HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
PAGE_SIZES = (24, 60, 120)
THUMB, LARGE = 192, 1280  # pixels
NUM_DRAWS = 8
MAX_PLAYED = 512 << 20  # bytes of a clip

Draw = Callable[[ShardSet, int, range], list[Image]]


@dataclass
class Site:
    """What the pages show. draw: training views of a sample (raises DataError, ShardError), None where there are none."""

    given: ShardSet | None = None
    runs: Path | None = None
    draw: Draw | None = None
    label: str = "cls"
    sets: dict[str, ShardSet] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set_of(self, run: str | None) -> ShardSet:
        """The shards given, or those of a run. Aborts where there are none."""
        if not run:
            return self.given or abort(404, "No shards were given: start browse.py with a pattern, or choose a run.")
        view = self.run(run)
        with self.lock:
            if run not in self.sets:
                try:
                    rows = view.shards()
                    self.sets[run] = ShardSet(load_shards([row.path for row in rows], progress=False)) if rows else ShardSet([])
                except (run_pages.HistoryError, ShardError) as error:
                    abort(404, str(error))
            return self.sets[run]

    def run(self, name: str) -> run_pages.RunView:
        """A run by its name. Aborts where there is none."""
        found = None if self.runs is None else run_pages.read_run(self.runs, name)
        return found or abort(404, "There is no such run.")


@dataclass(frozen=True)
class Selection:
    """What a grid shows: `numbers` of samples, and in words why these."""

    numbers: Sequence[int] | np.ndarray
    words: str
    keep: dict[str, Any]  # the query that gives it again


def create_app(site: Site) -> Flask:
    """The application; `site` may go on filling up."""
    app = Flask(__name__, static_folder="static", template_folder="templates")
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.globals.update(
        site=site, bar=charts.bar, kind_of=kind_of, link=link, say_bytes=format_bytes, say_number=run_pages.say_number, printable=printable
    )
    app.before_request(guard)
    app.after_request(finish)
    app.register_error_handler(HTTPException, error_page)
    app.register_error_handler(ShardError, lambda error: error_page(ShardGone(str(error))))
    rules: dict[str, Callable[..., Any]] = {
        "/": overview, "/health": health, "/samples": samples, "/sample/<int:number>": sample, "/thumb/<int:number>": thumb,
        "/field/<int:number>/<path:name>": field_bytes, "/drawn/<int:number>/<int:epoch>": drawn, "/find": find,
        "/runs": runs, "/run/<name>": run, "/run/<name>/live": run_live,
    }  # fmt: skip
    for rule, function in rules.items():
        app.add_url_rule(rule, function.__name__, _with_site(function, site), methods=["GET"])
    return app


class ShardGone(HTTPException):
    """A shard that can't be read any more."""

    code = 410


def _with_site(function: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def view(**parts: Any) -> Any:
        return function(site, **parts)

    return view


def guard() -> None:
    """Refuse what another site's page could send."""
    g.started = time.perf_counter()
    host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
    if host not in HOSTS:
        abort(421, "This server answers to 127.0.0.1 and localhost only.")
    if request.method not in ("GET", "HEAD"):
        abort(405)


def finish(response: Response) -> Response:
    """What every answer says."""
    response.headers.update(HEADERS)
    response.headers["Server-Timing"] = f"total;dur={1000 * (time.perf_counter() - g.get('started', time.perf_counter())):.1f}"
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def error_page(error: HTTPException) -> tuple[str, int]:
    """An error as a page."""
    return render_template("error.html", code=error.code, text=error.description or error.name), error.code or 500


def link(endpoint: str, **parts: Any) -> str:
    """A URL that keeps to the run whose shards are shown."""
    run = request.args.get("run")
    return url_for(endpoint, **{**({"run": run} if run and endpoint not in ("run", "runs", "overview") else {}), **parts})


def overview(site: Site) -> Any:
    """The shards with their health; the runs, where there are no shards."""
    if site.given is None:
        return redirect(url_for("runs"))
    return render_template("overview.html", **shard_table(site.given))


def health(site: Site) -> Any:
    """The part of the overview that fills up while shards are checked."""
    return render_template("health.html", **shard_table(site.set_of(None)))


def shard_table(shards: ShardSet) -> dict[str, Any]:
    """What the table of shards is made of. Whether they are checked is asked first: a page that says so is asked for no more."""
    checking = shards.checking
    return {"shards": shards, "checking": checking, "rows": shard_rows(shards), "page": _integer("page", 1)}


def shard_rows(shards: ShardSet) -> list[dict[str, Any]]:
    """The shards of a page of the overview: 100 each, with their problems."""
    first = 100 * (_integer("page", 1) - 1)
    rows = []
    for number in range(first, min(first + 100, len(shards.shards))):
        shard, found = shards.shards[number], shards.health.get(number)
        problems = [] if found is None else judge_shard(found.check, None)
        if found is None and shard.damage:
            rows.append({"number": number, "shard": shard, "state": "damaged", "problems": [shard.damage]})
            continue
        state = "unknown" if found is None else "bad" if problems else "good"
        rows.append({"number": number, "shard": shard, "state": state, "problems": [f"{one.kind}: {one.text}" for one in problems]})
    return rows


def samples(site: Site) -> Any:
    """A page of the grid."""
    shards = site.set_of(request.args.get("run"))
    chosen = select(shards)
    size = next((size for size in PAGE_SIZES if size == _integer("size", PAGE_SIZES[1])), PAGE_SIZES[1])
    num_pages = max(1, -(-len(chosen.numbers) // size))
    page = min(_integer("page", 1), num_pages)
    shown = shards.views(int(number) for number in chosen.numbers[(page - 1) * size : page * size])
    keep = {**chosen.keep, **({"size": size} if "size" in request.args else {})}
    return render_template(
        "samples.html", shards=shards, chosen=chosen, shown=shown, page=page, num_pages=num_pages, keep=keep, sizes=PAGE_SIZES, size=size,
        snippet=snippet,
    )  # fmt: skip


def select(shards: ShardSet) -> Selection:
    """What the query asks for."""
    query = request.args
    if text := query.get("q", "").strip():
        found = shards.search(text)
        if not len(found) and _is_integer(text) and int(text) < shards.num_samples:
            return Selection([int(text)], f"Sample number {text}", {"q": text})
        return Selection(found, f"Keys with “{printable(text)}”", {"q": text})
    if query.get("broken"):
        return Selection(shards.broken(), "Broken samples", {"broken": 1})
    if label := query.get("label"):
        known = next((one for one in shards.counts if str(one) == label), None)
        of_class = shards.of_class(known) if known is not None else ()
        return Selection(of_class, f"Class {printable(shards.say_label(known) or label)}", {"label": label})
    if "shard" in query:
        number = _integer("shard", 0, 0)
        if number >= len(shards.shards):
            abort(404, "There is no such shard.")
        return Selection(shards.of_shard(number), printable(shards.shards[number].name), {"shard": number})
    return Selection(range(shards.num_samples), "All samples", {})


def sample(site: Site, number: int) -> Any:
    """One sample in full."""
    shards = site.set_of(request.args.get("run"))
    view = _view(shards, number)
    fields = [(one, show(one, read_field(view, one) if _is_read(view, one) else b"")) for one in view.fields]
    can_draw = site.draw is not None and any(kind_of(one) in ("picture", "video") for one in view.fields)
    return render_template(
        "sample.html", shards=shards, number=number, view=view, fields=fields, draws=range(NUM_DRAWS) if can_draw else (),
        reason=shards.reason_of(number), label=shards.say_label(shards.label_of(number)),
    )  # fmt: skip


def thumb(site: Site, number: int) -> Any:
    """The picture that stands for a sample."""
    view = _view(site.set_of(request.args.get("run")), number)
    try:
        image = poster(view, THUMB)
    except DataError as error:
        abort(415, str(error))
    if image is None:
        abort(404, "This sample has no picture.")
    small = max(image.size) <= THUMB // 2
    return _picture(enlarged(image, THUMB), lossless=small)


def field_bytes(site: Site, number: int, name: str) -> Any:
    """A field: a picture drawn anew, a clip or sound to be played, anything else as a download."""
    view = _view(site.set_of(request.args.get("run")), number)
    found = view.find(name)
    if found is None:
        abort(404, "This sample has no such field.")
    data = read_field(view, found)
    if kind_of(found) == "picture" and not request.args.get("raw"):
        try:
            image = thumbnail(data, LARGE)
        except DataError as error:
            abort(415, str(error))
        return _picture(enlarged(image, 480), lossless=len(data) < 200_000 and max(image.size) <= LARGE // 2)
    import io

    if found.kind in PLAYED and not request.args.get("raw"):
        return send_file(io.BytesIO(data), PLAYED[found.kind], conditional=True, download_name="clip")
    return send_file(io.BytesIO(data), "application/octet-stream", as_attachment=True, download_name=f"sample-{number}.bin")


def drawn(site: Site, number: int, epoch: int) -> Any:
    """A sample as the model sees it in an epoch."""
    if site.draw is None:
        abort(404, "There are no training views.")
    shards = site.set_of(request.args.get("run"))
    _view(shards, number)
    try:
        return _picture(enlarged(site.draw(shards, number, range(epoch, epoch + 1))[0], THUMB), lossless=True)
    except (DataError, ShardError) as error:
        abort(415, str(error))


def find(site: Site) -> Any:
    """From a record of a bad sample to the sample."""
    run = request.args.get("run")
    shards = site.set_of(run)
    number = shards.find(request.args.get("shard", ""), _integer("index", 0, 0), request.args.get("key", ""))
    if number is None:
        abort(404, "This sample is not there any more: the shards were changed since.")
    return redirect(url_for("sample", number=number, run=run or None))


def runs(site: Site) -> Any:
    """The runs, the newest first."""
    if site.runs is None:
        abort(404, "Start browse.py with --runs FOLDER to see runs.")
    found = [run_pages.read_run(site.runs, name) for name in run_pages.list_runs(site.runs)[:200]]
    return render_template("runs.html", runs=[one for one in found if one is not None])


def run(site: Site, name: str) -> Any:
    """One run."""
    return render_template("run.html", run=site.run(name), **curves(site.run(name)))


def run_live(site: Site, name: str) -> Any:
    """The part of a run's page that changes while it trains."""
    return render_template("run_live.html", run=site.run(name), **curves(site.run(name)))


def curves(view: run_pages.RunView) -> dict[str, Any]:
    """The charts of a run, and its bad samples."""
    bad, num_bad = view.bad_samples()
    made = [
        charts.line_chart("Loss", {"training": view.line("train", "loss"), "validation": view.line("eval", "loss")}),
        charts.line_chart("Top-1", {"training": view.line("epoch", "top1"), "validation": view.line("eval", "top1")}, percent=True),
        charts.line_chart("Samples per second", {"training": view.line("train", "samples_per_second")}),
        charts.line_chart("Waiting for data", {"share of the time": view.waits()}, percent=True),
        charts.line_chart("Learning rate", {"lr": view.line("train", "lr")}),
    ]
    return {"charts": [one for one in made if one], "bad": bad, "num_bad": num_bad}


def snippet(view: SampleView) -> str:
    """The first words of a sample without a picture."""
    for one in view.fields:
        if kind_of(one) == "text" and one.size:
            shown = show(one, read_field(view, one)) if _is_read(view, one) else None
            if shown is not None and shown.text:
                return shown.text[:160]
    return ""


def _is_read(view: SampleView, one: Any) -> bool:
    return kind_of(one) not in ("picture", "video", "audio") and one.size <= 64 << 20


def _view(shards: ShardSet, number: int) -> SampleView:
    try:
        return shards.view(number)
    except IndexError:
        abort(404, f"There is no sample {number}: they are numbered 0 to {shards.num_samples - 1}.")


def _picture(image: Image, lossless: bool) -> Response:
    data, kind = encode_picture(image, lossless)
    return Response(data, mimetype=kind, headers={"Cache-Control": "private, max-age=60"})


def _integer(name: str, default: int, low: int = 1) -> int:
    text = request.args.get(name, "")
    return max(low, int(text)) if _is_integer(text) else default


def _is_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


__all__ = ["HEADERS", "Site", "create_app"]
