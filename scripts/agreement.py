"""How far a step agrees with itself: on 1, 2 and 4 processes, in micro-batches, in mixed precision, channels last.

    python scripts/agreement.py shards/digits/train            a table: how far the weights are from one process's after 50 steps

A small network without batch norm and dropout learns the same global batches in every row (gloo, CPU). What is told is the distance of all
weights from those of the first row, relative to how far these have moved from their start, and the loss of the last steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

from data import build_loader  # noqa: E402
from engine import distributed  # noqa: E402
from engine.flags import Parser  # noqa: E402
from engine.forward import Forward  # noqa: E402
from engine.losses import cross_entropy  # noqa: E402
from engine.mixing import Mixing  # noqa: E402
from engine.optim import create_optimizer  # noqa: E402
from engine.step import Step  # noqa: E402

# name -> processes, and what differs from one process in float32
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "1 process, again": (1, {}),
    "2 processes": (2, {}),
    "4 processes": (4, {}),
    "--grad-accum 2": (1, {"grad_accum": 2}),
    "--grad-accum 8": (1, {"grad_accum": 8}),
    "2 processes, --grad-accum 4": (2, {"grad_accum": 4}),
    "--channels-last": (1, {"channels_last": True}),
    "--amp bf16": (1, {"amp": "bf16"}),
    "--amp fp16": (1, {"amp": "fp16"}),
}
CLASSES = 10


def create_network() -> nn.Module:
    """Three convolutions and a linear; nothing in it depends on how a batch is cut. Not ReLU: at its kink rounding becomes a jump, and
    after some dozens of steps even two orders of the same sum are 0.1 % apart."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2), nn.Tanh(), nn.Conv2d(32, 32, 3), nn.Tanh(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def train(rank: int, world_size: int, port: int, shards: str, steps: int, batch_size: int, how: dict[str, Any], path: str) -> None:
    """One rank; rank 0 leaves the weights and the last losses in a file."""
    torch.set_num_threads(1)
    ranks = distributed.start(rank, nproc=world_size, store_port=port)
    model = create_network()
    if how.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    step = Step(
        model=distributed.wrap(model, ranks), optimizer=create_optimizer(model, "sgd", 0.05, 0.9, 5e-4), schedule=lambda position: 0.05,
        forward=Forward(ranks.device, how.get("amp", "off"), how.get("channels_last", False)), loss=cross_entropy, smoothing=0.0,
        mixing=Mixing(0.0, 0.0, CLASSES), grad_accum=how.get("grad_accum", 1), clip_grad=0.0, ema=None, seed=0, rank=rank,
        world_size=world_size,
    )  # fmt: skip
    loader = build_loader(shards, batch_size=batch_size, img_size=32, epochs=1000, rank=rank, world_size=world_size)
    step.warm_up(loader.task.new_batch(-(-batch_size // world_size)))
    losses = []
    for number, batch in enumerate(loader):
        counts = torch.tensor(int(batch["valid"].sum()))
        work = ranks.start_sum(counts)

        def count(work: Any = work, counts: torch.Tensor = counts) -> int:
            work.wait()
            return int(counts)

        losses.append(float(ranks.sum(step(number * batch_size, number, batch, count).losses.sum().double())) / int(counts))
        if number + 1 == steps:
            break
    if rank == 0:
        torch.save({"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "loss": sum(losses[-5:]) / 5}, path)
    distributed.shut_down()


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="PATTERN", help="shards of pictures in at most ten classes")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("-b", "--batch-size", type=int, default=64, metavar="N", help="default: 64")
    args = parser.parse_args()
    start = torch.cat([p.detach().flatten() for p in create_network().parameters()])
    first = None
    print(f"| | distance after {args.steps} steps | mean loss of the last 5 |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (world_size, how) in ROWS.items():
            store, port = distributed.host_store()
            path = str(Path(folder, "weights.pt"))
            mp.spawn(train, args=(world_size, port, args.shards, args.steps, args.batch_size, how, path), nprocs=world_size)
            del store
            found = torch.load(path, weights_only=True)
            first = found["weights"] if first is None else first
            distance = float((found["weights"] - first).norm() / (first - start).norm())
            print(f"| {name} | {distance:.1e} | {found['loss']:.5f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
