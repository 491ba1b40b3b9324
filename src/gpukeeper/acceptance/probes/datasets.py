"""Data sets in local directories: nothing is downloaded, and a missing data set is an error, never replaced.

Needs neither PyTorch nor numpy. CIFAR comes as pickles, which can run arbitrary code: here they can build lists, dicts
and arrays of bytes, and nothing else.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from gpukeeper.acceptance.probes.ranks import BadSetting, DataMissing

SYNTHETIC = "synthetic"
IMAGENET_SAMPLES = 5000
_IMAGENET_SIDE = 224
_IMAGENET_SHORT = 256
_PICTURES = {".jpeg", ".jpg", ".png"}
_LARGEST = 2**31  # bytes of one file, unpacked


@dataclass(frozen=True)
class ImageSet:
    """Pixels of 0–255, one image after the other, each channel by channel."""

    pixels: bytearray
    labels: list[int]
    channels: int
    height: int
    width: int

    def __post_init__(self) -> None:
        size = self.channels * self.height * self.width
        if not self.labels or len(self.pixels) != len(self.labels) * size:
            raise ValueError(f"{len(self.pixels)} bytes of pixels do not match {len(self.labels)} images of {size}")


def load(name: str, directory: str | None, *, part: int = 0, parts: int = 1) -> ImageSet:
    """Every `parts`-th image from `part` on: what one rank trains with. All of a small set, 5,000 of ImageNet."""
    if name not in _SETS:
        raise BadSetting(f"Unknown data set {name!r}; valid values: {', '.join((SYNTHETIC, *_SETS))}.")
    found = _SETS[name]
    if not directory:
        raise DataMissing(f"The data set {name} needs data_dir. Expected in it: {found.layout}.")
    places = [place for way in found.ways for place in (Path(directory), Path(directory) / name) if way.fits(place)]
    if not places:
        tried = ", ".join(sorted({str(Path(directory) / one.there) for one in found.ways}))
        raise DataMissing(f"The data set {name} is not in {directory}: {tried} not found. Expected: {found.layout}.")
    way = next(one for one in found.ways if one.fits(places[0]))
    try:
        return way.read(places[0], part, parts)
    except (OSError, EOFError, ValueError, KeyError, struct.error, pickle.UnpicklingError) as error:
        raise DataMissing(
            f"The data set {name} could not be read in {places[0]}: {error}. Copy it again. Expected: {found.layout}."
        ) from error


@dataclass(frozen=True)
class _Layout:
    """One layout: it fits where `there` is."""

    there: str
    read: Callable[[Path, int, int], ImageSet]

    def fits(self, directory: Path) -> bool:
        return next(directory.glob(self.there), None) is not None if directory.is_dir() else False


@dataclass(frozen=True)
class _DataSet:
    layout: str
    ways: tuple[_Layout, ...]


# Fashion-MNIST: idx files, packed or not


def _fashion(inner: str) -> Callable[[Path, int, int], ImageSet]:
    def read(directory: Path, part: int, parts: int) -> ImageSet:
        shape, pixels = _idx(directory / inner / "train-images-idx3-ubyte")
        (count,), labels = _idx(directory / inner / "train-labels-idx1-ubyte")
        if len(shape) != 3 or shape[0] != count:
            raise ValueError(f"{shape} images do not match {count} labels")
        size = shape[1] * shape[2]
        chosen = range(part, count, parts)
        return ImageSet(_joined(pixels, chosen, size), [labels[i] for i in chosen], 1, shape[1], shape[2])

    return read


def _idx(path: Path) -> tuple[tuple[int, ...], bytes]:
    """Two zero bytes, the type (8: bytes), the number of dimensions, each as a big-endian number, then the bytes."""
    with _opened(path) as file:
        zero, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zero or kind != 8 or not 0 < dimensions < 4:
            raise ValueError(f"{path.name} is not an idx file of bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        size = 1
        for one in shape:
            size *= one
        values = file.read(min(size, _LARGEST) + 1)
    if len(values) != size:
        raise ValueError(f"{path.name} has {len(values)} values instead of {size}")
    return shape, values


def _opened(path: Path) -> BinaryIO:
    if path.exists():
        return path.open("rb")
    return gzip.open(path.with_name(path.name + ".gz"))  # type: ignore[return-value]  # it reads bytes all the same


# CIFAR: pickles of dicts, or records of labels and pixels


def _cifar_pickles(names: Iterable[str], key: bytes) -> Callable[[Path, int, int], ImageSet]:
    files = tuple(names)

    def read(directory: Path, part: int, parts: int) -> ImageSet:
        pixels, labels = bytearray(), []
        for name in files:
            with (directory / name).open("rb") as file:
                batch = unpickle(file)
            pixels += batch[b"data"].bytes()
            labels += list(batch[key])
        return _cifar(pixels, labels, part, parts)

    return read


def _cifar_records(names: Iterable[str], label_bytes: int) -> Callable[[Path, int, int], ImageSet]:
    """The last label byte is the fine one."""
    files = tuple(names)
    size = label_bytes + 3072

    def read(directory: Path, part: int, parts: int) -> ImageSet:
        whole = b"".join((directory / name).read_bytes() for name in files)
        if len(whole) % size:
            raise ValueError(f"{len(whole)} bytes are not a multiple of the record size {size}")
        starts = range(0, len(whole), size)
        pixels = bytearray().join(whole[start + label_bytes : start + size] for start in starts)
        return _cifar(pixels, [whole[start + label_bytes - 1] for start in starts], part, parts)

    return read


def _cifar(pixels: bytearray, labels: list[int], part: int, parts: int) -> ImageSet:
    chosen = range(part, len(labels), parts)
    return ImageSet(_joined(pixels, chosen, 3072), [labels[i] for i in chosen], 3, 32, 32)


def _joined(pixels: bytes | bytearray, chosen: Iterable[int], size: int) -> bytearray:
    return bytearray().join(pixels[i * size : (i + 1) * size] for i in chosen)


class _Array:
    """What a pickled array of bytes becomes: numpy's state, without numpy."""

    def __init__(self, *_: object) -> None:
        self._raw = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        raw = state[4]
        self._raw = raw.encode("latin-1") if isinstance(raw, str) else bytes(raw)

    def bytes(self) -> bytes:
        return self._raw


class _Kind:
    """What a pickled dtype becomes. Only bytes are read."""

    def __init__(self, name: object = "", *_: object) -> None:
        if name not in ("u1", b"u1", "uint8"):
            raise ValueError(f"an array of {name!r}; only bytes are supported")

    def __setstate__(self, _: object) -> None:
        return None


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode("latin-1" if encoding == "latin1" else encoding)


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _from_buffer(raw: Any, *_: object) -> _Array:
    """As newer releases of numpy pickle."""
    found = _Array()
    found.__setstate__((0, 0, 0, 0, raw))
    return found


_HARMLESS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encoded,
}


class _Unpickler(pickle.Unpickler):
    """Of everything that a pickle may name only what an array of bytes needs, and of that our own stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not part of a CIFAR file; it was not executed"
            )
        return _HARMLESS[module, name]


def unpickle(file: BinaryIO) -> Any:
    """A CIFAR batch: keys are bytes, whichever Python wrote it."""
    found = _Unpickler(io.BytesIO(file.read(_LARGEST)), encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("it is not a CIFAR batch")
    return {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}


# ImageNet: a directory for each class


def _imagenet(inner: str) -> Callable[[Path, int, int], ImageSet]:
    def read(directory: Path, part: int, parts: int) -> ImageSet:
        classes = sorted(path for path in (directory / inner).iterdir() if path.is_dir())
        # From every class one, then the next of each: 5,000 of all classes, not of the first four.
        queues = [iter(sorted(_pictures(path))) for path in classes]
        chosen = list(islice(_in_turn(queues), IMAGENET_SAMPLES))[part::parts]
        pixels = bytearray().join(_decoded(path) for _, path in chosen)
        return ImageSet(pixels, [label for label, _ in chosen], 3, _IMAGENET_SIDE, _IMAGENET_SIDE)

    return read


def _pictures(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.suffix.lower() in _PICTURES)


def _in_turn(queues: list[Iterator[Path]]) -> Iterator[tuple[int, Path]]:
    left = dict(enumerate(queues))
    while left:
        for label in list(left):
            path = next(left[label], None)
            if path is None:
                del left[label]
            else:
                yield label, path


def _decoded(path: Path) -> bytes:
    """The shorter side to 256, the middle 224 × 224, channel by channel."""
    try:
        image: Any = import_module("PIL.Image")
    except ImportError as error:
        raise DataMissing(
            "The data set imagenet could not be read: PIL is not installed in this Python. Install pillow."
        ) from error
    with image.open(path) as opened:
        picture = opened.convert("RGB")
    scale = _IMAGENET_SHORT / min(picture.size)
    picture = picture.resize([max(_IMAGENET_SIDE, round(side * scale)) for side in picture.size])
    left, top = ((side - _IMAGENET_SIDE) // 2 for side in picture.size)
    picture = picture.crop((left, top, left + _IMAGENET_SIDE, top + _IMAGENET_SIDE))
    return b"".join(channel.tobytes() for channel in picture.split())


_FASHION = "train-images-idx3-ubyte"
_TEN = [f"data_batch_{n}" for n in range(1, 6)]
_SETS = {
    "fashion_mnist": _DataSet(
        "train-images-idx3-ubyte and train-labels-idx1-ubyte, compressed (.gz) or not",
        tuple(_Layout(f"{inner}{_FASHION}*", _fashion(inner)) for inner in ("", "FashionMNIST/raw/", "raw/")),
    ),
    "cifar10": _DataSet(
        "cifar-10-batches-py/data_batch_1 to 5, or cifar-10-batches-bin/data_batch_1.bin to 5",
        (
            _Layout(
                "cifar-10-batches-py/data_batch_1",
                _cifar_pickles((f"cifar-10-batches-py/{n}" for n in _TEN), b"labels"),
            ),
            _Layout(
                "cifar-10-batches-bin/data_batch_1.bin",
                _cifar_records((f"cifar-10-batches-bin/{n}.bin" for n in _TEN), 1),
            ),
        ),
    ),
    "cifar100": _DataSet(
        "cifar-100-python/train, or cifar-100-binary/train.bin",
        (
            _Layout("cifar-100-python/train", _cifar_pickles(("cifar-100-python/train",), b"fine_labels")),
            _Layout("cifar-100-binary/train.bin", _cifar_records(("cifar-100-binary/train.bin",), 2)),
        ),
    ),
    "imagenet": _DataSet(
        "one directory per class with JPEG or PNG files, in imagenet/ or imagenet/train/",
        tuple(_Layout(f"{inner}*/*.*", _imagenet(inner)) for inner in ("imagenet/train/", "train/", "imagenet/", "")),
    ),
}
NAMES = (SYNTHETIC, *_SETS)
