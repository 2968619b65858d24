"""The loaders of pictures that are compared, each as its own documentation would have it.

in: shards, a work folder (for a loader's own format, made once), workers  ->  out: batches without end
Invariant: batches are of one kind: uint8 (64, 3, 224, 224) after RandomResizedCrop (antialiased) and a flip, with labels.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from inputs import made_shards, samples

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIDE, PICTURES, SMALL = 224, 64, 256
Batches = Iterable[Any]


def tensor_transform() -> Callable[[Any], Any]:
    """What most training scripts have: PIL, torchvision's first transforms."""
    from torchvision import transforms as T

    return T.Compose([T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.PILToTensor()])


def from_jpeg(data: bytes, transform: Callable[[Any], Any]) -> Any:
    from PIL import Image

    return transform(Image.open(io.BytesIO(data)).convert("RGB"))


def torch_loader(dataset: Any, batch_size: int | None, workers: int, **more: Any) -> Any:
    from torch.utils.data import DataLoader

    more = {"multiprocessing_context": "fork", "prefetch_factor": 2, **more} if workers else more
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, **more)


def again_and_again(make: Callable[[], Batches]) -> Iterator[Any]:
    while True:
        yield from make()


def shardline(shards: list[str], work: Path, workers: int) -> Batches:
    """With the C part: fails where that can't be used."""
    from data import build_loader

    native = {"decoder": "native"}
    return build_loader(shards, batch_size=PICTURES, img_size=SIDE, num_workers=workers, epochs=1000, num_classes=1000, transform=native)


def shardline_python(shards: list[str], work: Path, workers: int) -> Batches:
    """Without the C part."""
    from data import build_loader

    python = {"decoder": "python"}
    return build_loader(shards, batch_size=PICTURES, img_size=SIDE, num_workers=workers, epochs=1000, num_classes=1000, transform=python)


def shardline_marked(shards: list[str], work: Path, workers: int) -> Batches:
    """The same pictures with restart markers, with the C part."""
    return shardline(made_shards(work, shards, "marked", "--restart-markers"), work, workers)


def shardline_marked_python(shards: list[str], work: Path, workers: int) -> Batches:
    """The same pictures with restart markers, without the C part."""
    return shardline_python(made_shards(work, shards, "marked", "--restart-markers"), work, workers)


def shardline_raw(shards: list[str], work: Path, workers: int) -> Batches:
    """The same pictures uncompressed, brought to a short side of 256."""
    return shardline_python(made_shards(work, shards, "raw", "--encode", "raw", "--resize", "256"), work, workers)


# The evaluation's view: short side to 256, the middle 224.


def shardline_evaluation(shards: list[str], work: Path, workers: int, decoder: str = "native") -> Batches:
    from data import build_loader

    return again_and_again(lambda: build_loader(
        shards, batch_size=PICTURES, img_size=SIDE, num_workers=workers, num_classes=1000, training=False, transform={"decoder": decoder}
    ))  # fmt: skip


def shardline_python_evaluation(shards: list[str], work: Path, workers: int) -> Batches:
    return shardline_evaluation(shards, work, workers, "python")


def webdataset_evaluation(shards: list[str], work: Path, workers: int) -> Batches:
    import webdataset as wds
    from torchvision import transforms as T

    transform = T.Compose([T.Resize(256), T.CenterCrop(SIDE), T.PILToTensor()])
    dataset = wds.WebDataset(shards, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "cls").map_tuple(transform, int)
    return again_and_again(lambda: torch_loader(dataset.batched(PICTURES, partial=False).repeat(100), None, workers))


# webdataset as its documentation shows it.


def webdataset(shards: list[str], work: Path, workers: int) -> Batches:
    import webdataset as wds

    transform = tensor_transform()
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), resampled=False)
        .shuffle(1000).decode("pilrgb").to_tuple("jpg", "cls").map_tuple(transform, int).batched(PICTURES, partial=False)
    )  # fmt: skip
    return again_and_again(lambda: torch_loader(dataset.repeat(100), None, workers))


def timm(shards: list[str], work: Path, workers: int) -> Batches:
    from timm.data import create_dataset
    from timm.data.loader import fast_collate

    split = f"{{000..{len(shards) - 1:03d}}}.tar"
    dataset = create_dataset(
        "wds/", root=str(Path(shards[0]).parent), split=split, is_training=True, batch_size=PICTURES, num_samples=3000,
        input_key="jpg",
    )  # fmt: skip
    dataset.transform = _array_transform()
    return again_and_again(lambda: torch_loader(dataset, PICTURES, workers, collate_fn=fast_collate))


def _array_transform() -> Callable[[Any], Any]:
    import numpy as np
    from torchvision import transforms as T

    crop = T.Compose([T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip()])
    return lambda image: np.array(crop(image), np.uint8).transpose(2, 0, 1)


def huggingface(shards: list[str], work: Path, workers: int) -> Batches:
    from datasets import Features, Image, Value, load_dataset

    transform = tensor_transform()
    features = Features({"jpg": Image(), "cls": Value("int64"), "__key__": Value("string"), "__url__": Value("string")})
    stream = load_dataset("webdataset", data_files=shards, split="train", streaming=True, features=features)
    stream = stream.shuffle(buffer_size=1000).map(
        lambda row: {"image": transform(row["jpg"].convert("RGB")), "label": row["cls"]}, remove_columns=list(features)
    )
    return again_and_again(lambda: torch_loader(stream.with_format("torch"), PICTURES, workers))


def mosaic(shards: list[str], work: Path, workers: int) -> Batches:
    dataset = mosaic_dataset(shards, work / "mosaic", "jpg", PICTURES, tensor_transform())
    return again_and_again(lambda: torch_loader(dataset, PICTURES, workers))


def mosaic_dataset(shards: list[str], target: Path, field: str, batch_size: int, transform: Any) -> Any:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if not (target / "index.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        with MDSWriter(out=str(target), columns={"data": "bytes", "label": "int"}) as out:
            for data, label in samples(shards, field):
                out.write({"data": data, "label": label})
    clean_stale_shared_memory()

    class Pictures(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return (from_jpeg(row["data"], transform) if transform else row["data"]), row["label"]

    return Pictures(local=str(target), shuffle=True, batch_size=batch_size)


def litdata(shards: list[str], work: Path, workers: int) -> Batches:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])

    def view(data: bytes) -> Any:
        return crop(decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB))

    return litdata_loader(shards, work / "litdata", "jpg", PICTURES, workers, view)


def litdata_loader(shards: list[str], target: Path, field: str, batch_size: int, workers: int, view: Any) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    if not (target / "index.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        writer = BinaryWriter(str(target), chunk_bytes="64MB")
        for number, (data, label) in enumerate(samples(shards, field)):
            writer[number] = (data, label)
        writer.done()
        writer.merge()

    class Samples(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            data, label = super().__getitem__(index)
            return (view(data) if view else data), label

    dataset = Samples(str(target), shuffle=True)
    more = {} if view else {"collate_fn": list}
    return again_and_again(lambda: StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, **more))


def dali(shards: list[str], work: Path, workers: int) -> Batches:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=PICTURES, num_threads=max(1, workers), device_id=None, prefetch_queue_depth=2)
    def pictures() -> Any:
        data, label = fn.readers.webdataset(paths=shards, index_paths=dali_indexes(shards, work), ext=["jpg", "cls"],
                                            random_shuffle=True, initial_fill=1000)  # fmt: skip
        image = fn.decoders.image_random_crop(data, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        image = fn.resize(image, size=[SIDE, SIDE], antialias=True, interp_type=types.INTERP_LINEAR)
        image = fn.flip(image, horizontal=fn.random.coin_flip())
        return fn.transpose(image, perm=[2, 0, 1]), fn.pad(label)

    return dali_batches(pictures())


def dali_batches(pipeline: Any) -> Iterator[Any]:
    import torch

    pipeline.build()
    while True:
        data, label = pipeline.run()
        yield torch.from_numpy(data.as_array().copy()), torch.from_numpy(label.as_array().copy())


def dali_indexes(shards: list[str], work: Path) -> list[str]:
    """DALI's own index files: a line per sample, of extension, data offset and size of each of its members."""
    from data.tar import walk

    target = work / "dali"
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in shards:
        path = target / (Path(shard).name + ".txt")
        paths.append(str(path))
        if not path.exists():
            members = list(walk(Path(shard).read_bytes()))
            pairs = zip(members[::2], members[1::2], strict=True)
            rows = [" ".join(f"{m.name.partition('.')[2]} {m.data_offset} {m.size} {m.name}" for m in pair) for pair in pairs]
            path.write_text(f"v1.2 {len(rows)}\n" + "\n".join(rows) + "\n")
    return paths


def spdl(shards: list[str], work: Path, workers: int) -> Batches:
    """Its tar walk, its FFmpeg decoding with crop and scale as filters, its thread pool."""
    import random

    import spdl.io
    import torch
    from PIL import Image
    from spdl.pipeline import PipelineBuilder
    from torchvision.transforms import RandomResizedCrop

    def source() -> Iterator[bytes]:
        while True:
            for shard in random.sample(shards, len(shards)):
                yield from (bytes(data) for name, data in spdl.io.iter_tarfile(Path(shard).read_bytes()) if name.endswith(".jpg"))

    def view(data: bytes) -> Any:
        size = torch.empty((3, *Image.open(io.BytesIO(data)).size[::-1]), device="meta")
        top, left, height, width = RandomResizedCrop.get_params(size, [0.08, 1.0], [3 / 4, 4 / 3])
        flip = "hflip," if random.random() < 0.5 else ""
        filters = f"crop={width}:{height}:{left}:{top}:exact=1,{flip}scale={SIDE}:{SIDE}:flags=bilinear,format=pix_fmts=rgb24"
        return spdl.io.to_torch(spdl.io.load_image(data, filter_desc=filters)).permute(2, 0, 1)

    threads = max(1, workers)
    builder = PipelineBuilder().add_source(source()).pipe(view, concurrency=threads).aggregate(PICTURES).pipe(torch.stack).add_sink(2)
    pipeline = builder.build(num_threads=threads)
    pipeline.start()
    return pipeline.get_iterator()
