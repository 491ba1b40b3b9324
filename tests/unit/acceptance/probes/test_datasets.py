"""Data sets from small files made here: all layouts of C1.5, what is missing or damaged, what wants to run code."""

from __future__ import annotations

import gzip
import pickle
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.probes import datasets
from gpukeeper.acceptance.probes.ranks import BadSetting, DataMissing


def _idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + values


def _fashion(folder: Path, count: int = 6, packed: bool = True) -> None:
    folder.mkdir(parents=True)
    files = {
        "train-images-idx3-ubyte": _idx((count, 28, 28), bytes(count * 784)),
        "train-labels-idx1-ubyte": _idx((count,), bytes(range(count))),
    }
    for name, content in files.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("inner", ["", "FashionMNIST/raw", "fashion_mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_in_the_usual_directories_packed_or_not(tmp_path: Path, inner: str, packed: bool) -> None:
    _fashion(tmp_path / "data" / inner, packed=packed)
    images = datasets.load("fashion_mnist", str(tmp_path / "data"))
    assert (len(images.labels), images.channels, images.height, images.width) == (6, 1, 28, 28)


def test_ranks_take_turns(tmp_path: Path) -> None:
    _fashion(tmp_path / "data")
    parts = [datasets.load("fashion_mnist", str(tmp_path / "data"), part=part, parts=4).labels for part in range(4)]
    assert parts == [[0, 4], [1, 5], [2], [3]]


def _pickled(batch: dict[Any, Any], pixels: bytes, module: str = "numpy.core.multiarray") -> bytes:
    """Protocol 2, as the files of CIFAR have it: str of Python 2 are opcodes SHORT_BINSTRING and BINSTRING."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def glob(where: str, name: str) -> bytes:
        return f"c{where}\n{name}\n".encode()

    number = b"K"
    kind = glob("numpy", "dtype") + text(b"u1") + number + b"\0" + number + b"\1\x87R"
    kind += b"(" + number + b"\3" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + number + b"\0tb"
    shape = b"M" + struct.pack("<H", len(pixels) // 3072) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = glob(module, "_reconstruct") + glob("numpy", "ndarray") + number + b"\0\x85" + text(b"b") + b"\x87R"
    array += b"(" + number + b"\1" + shape + kind + b"\x89" + text(pixels) + b"tb"
    items = text(b"data") + array
    for key, labels in batch.items():
        items += text(key) + b"]" + b"(" + b"".join(number + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + items + b"u."


def _cifar10(folder: Path, each: int = 2) -> bytes:
    folder.mkdir(parents=True)
    whole = b""
    for batch in range(5):
        pixels = bytes((batch + i) % 256 for i in range(each * 3072))
        labels = [(batch + i) % 10 for i in range(each)]
        (folder / f"data_batch_{batch + 1}").write_bytes(_pickled({b"labels": labels}, pixels))
        whole += pixels
    return whole


def test_cifar10_from_pickles_of_python_2_without_numpy(tmp_path: Path) -> None:
    whole = _cifar10(tmp_path / "cifar-10-batches-py")
    images = datasets.load("cifar10", str(tmp_path))
    assert bytes(images.pixels) == whole
    assert images.labels == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert (images.channels, images.height, images.width) == (3, 32, 32)


def test_cifar100_from_pickles_has_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar100/cifar-100-python"
    folder.mkdir(parents=True)
    batch = {b"coarse_labels": [1, 2], b"fine_labels": [91, 92]}
    (folder / "train").write_bytes(_pickled(batch, bytes(2 * 3072), "numpy._core.multiarray"))
    assert datasets.load("cifar100", str(tmp_path)).labels == [91, 92]


@pytest.mark.parametrize(
    ("name", "files", "record", "labels"),
    [
        ("cifar10", [f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)], bytes([7]), [7] * 5),
        ("cifar100", ["cifar-100-binary/train.bin"], bytes([3, 77]), [77]),
    ],
)
def test_cifar_from_records(tmp_path: Path, name: str, files: list[str], record: bytes, labels: list[int]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(record + bytes(3072))
    assert datasets.load(name, str(tmp_path)).labels == labels


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("was-run"), "")


@pytest.mark.parametrize("payload", [_Bomb(), {"labels": [_Bomb()]}])
def test_a_pickle_that_wants_to_run_code_is_refused(
    tmp_path: Path, payload: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "train").write_bytes(pickle.dumps(payload))
    with pytest.raises(DataMissing, match="which is not part of a CIFAR file; it was not executed"):
        datasets.load("cifar100", str(tmp_path))
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("name", datasets.NAMES[1:])
def test_what_is_missing_is_reported_with_the_layout_and_where_it_was_searched(tmp_path: Path, name: str) -> None:
    """C1.5: missing data silently became synthetic."""
    with pytest.raises(DataMissing) as error:
        datasets.load(name, str(tmp_path))
    assert str(error.value).startswith(f"The data set {name} is not in {tmp_path}: {tmp_path}/")
    assert "Expected: " in str(error.value)
    with pytest.raises(DataMissing, match=f"The data set {name} needs data_dir"):
        datasets.load(name, None)


@pytest.mark.parametrize("damage", ["short", "kind", "pair"])
def test_a_damaged_file_is_not_read_as_less_data(tmp_path: Path, damage: str) -> None:
    _fashion(tmp_path / "data", packed=False)
    images = tmp_path / "data/train-images-idx3-ubyte"
    content = {
        "short": images.read_bytes()[:-1],
        "kind": b"\0\0\x0d\3" + images.read_bytes()[4:],
        "pair": _idx((5, 28, 28), bytes(5 * 784)),
    }
    images.write_bytes(content[damage])
    with pytest.raises(DataMissing, match="The data set fashion_mnist could not be read in"):
        datasets.load("fashion_mnist", str(tmp_path / "data"))


def test_an_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(BadSetting, match="valid values: synthetic, fashion_mnist, cifar10, cifar100, imagenet"):
        datasets.load("imagnet", "x")


def test_imagenet_takes_from_every_class_in_turn(tmp_path: Path) -> None:
    """5,000 of all classes, not of the first four."""
    queues = [iter([tmp_path / f"{label}-{n}" for n in range(count)]) for label, count in enumerate((3, 1, 2))]
    assert [label for label, _ in datasets._in_turn(queues)] == [0, 1, 2, 0, 2, 0]


@pytest.mark.skipif(find_spec("PIL") is not None, reason="PIL is installed here")
def test_imagenet_without_pil_shows_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "imagenet/n01440764").mkdir(parents=True)
    (tmp_path / "imagenet/n01440764/a.JPEG").write_bytes(b"")
    with pytest.raises(DataMissing, match="PIL is not installed in this Python"):
        datasets.load("imagenet", str(tmp_path))
