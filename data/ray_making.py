"""Shards made by the machines of a Ray cluster, each shard by one task.

in: plans, a reader of pictures that every machine can reach  ->  out: shards in a folder that all share, or in a store; a record of each
Invariant: a task does what a local worker does, so the bytes are those of a local run. Records are noted here, by one process.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import native
from .errors import ShardError
from .making import ShardWork
from .output import Done, append_record
from .packing import ShardPlan
from .publishing import publish_folder
from .readers import FolderReader
from .tables import SourceError

INSTALL = "pip install 'ray>=2.60,<3'"


def make_on_ray(work: ShardWork, plans: Sequence[ShardPlan], workers: int | None, url: str = "") -> Iterator[tuple[ShardPlan, Done]]:
    """Each plan with what became of it, in the order in which they end; at most `workers` at once (default: the cluster's cores).

    url: where tasks send their shards; without it they write them to `work.out`, which must be one folder on all machines. The cluster is
    the one that RAY_ADDRESS names (`local`: one on this machine, for this run), else the one that is found. Raises SourceError, ShardError.
    """
    if not plans:
        return
    journal, work = work.journal, replace(work, journal="")
    ray = _connect()
    try:
        shared = ray.put(work)
        make = ray.remote(num_cpus=1)(_make)
        at_once = workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # some wait, so that no core does
        waiting = list(reversed(plans))
        running: dict[Any, ShardPlan] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                plan = waiting.pop()
                running[make.remote(shared, plan, url)] = plan
            (ended,), _ = ray.wait(list(running))
            plan, done = running.pop(ended), _result(ray, ended)
            if not url and not os.path.exists(os.path.join(work.out, plan.path)):
                where = f"{work.out}: {plan.path} was made elsewhere and is not here"
                raise SourceError(f"{where}: give a folder that all machines of the cluster share, or a URL")
            append_record(journal, plan.path, done)
            yield plan, done
    finally:
        ray.shutdown()


def _connect() -> Any:
    """Ray, joined to a cluster whose workers have this package."""
    try:
        import ray
    except ImportError:
        raise SourceError(f"--executor ray needs a package that is missing: {INSTALL}") from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    package = os.path.dirname(os.path.abspath(__file__))
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "/" not in host:  # ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), 10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"py_modules": [package]})
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceError(
            f"--executor ray: no cluster can be reached at {address} ({reason}): start one (ray start --head), name one in RAY_ADDRESS, "
            "or set RAY_ADDRESS=local for this machine alone"
        ) from None
    return ray


def _result(ray: Any, task: Any) -> Done:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceError(f"--executor ray: a task was lost ({reason}): run the same command again, it goes on where it stopped") from None


def _make(work: ShardWork, plan: ShardPlan, url: str) -> Done:
    """One shard, on whatever machine this is."""
    here = socket.gethostname()
    source = work.reader.root if isinstance(work.reader, FolderReader) else work.reader.path
    if not os.path.exists(source):
        raise SourceError(f"{source}: not on {here}: the source must lie in one place on all machines of the cluster")
    if work.restart_markers and (absent := native.why_absent()):
        raise SourceError(f"--restart-markers needs the native part on all machines of the cluster; on {here}: {absent}")
    if not url:
        folder = os.path.dirname(os.path.join(work.out, plan.path))
        if not os.path.isdir(folder):
            raise SourceError(f"{folder}: not on {here}: give a folder that all machines of the cluster share, or a URL")
        return work(plan)
    with tempfile.TemporaryDirectory() as scratch:
        os.makedirs(os.path.dirname(os.path.join(scratch, plan.path)), exist_ok=True)
        done = replace(work, out=scratch)(plan)
        try:
            publish_folder(scratch, [plan.path + ".idx", plan.path], url, anew=True)
        except ShardError as error:
            raise ShardError(f"{here}: {error}") from None
    return done
