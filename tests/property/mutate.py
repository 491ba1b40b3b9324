"""Inputs for parsers: samples, damaged by a seed. The same seed gives the same bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

ODD = (
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\x00",
        b"\x1b[31m",
        b"\r",
        b"\n",
        b"\n\n",
        b"\t",
        b" ",
        b"\\",
        b'"',
        b"'",
        b"%s",
        b"{x}",
        b"{}",
    ),
    *("\u2028".encode(), "\x85".encode(), "\u202e".encode(), "٣".encode(), "²".encode(), "\U0001f600".encode()),
    *(
        b"-1",
        b"0",
        b"9" * 19,
        b"9" * 40,
        b"9" * 5000,
        b"1e999",
        b"NaN",
        b"Infinity",
        b"0x10",
        b"1_000",
        b"-0",
        b"1e-999",
    ),
    *(
        b"9999-12-31T23:59:59-12:00",
        b"0001-01-01T00:00:00Z",
        b"2026-02-30T00:00:00Z",
        b"2026-11-15T12:00:00",
        b"9999-12-31",
    ),
    *(b"null", b"true", b"[", b"]", b"{", b"}", b",", b":", b"[" * 2000, b'{"a":' * 2000, b"\\ud800", b"\\u0000"),
    *(b"36500d", b"999999999999999999w", b"-5m", b"..", b"/", b"//", b"../../etc", b"*", b"[!", b"(deleted)", b")"),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2**31,
        2**63,
        10**30,
        -(10**30),
        1.5,
        1e300,
        "",
        " ",
        "x",
        "{x}",
        "[red]",
        "\x1b[2J",
        "\u2028",
    ),
    *("9" * 20, "9" * 5000, "NaN", "inf", "-1", "1e400", "9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59Z"),
    *(
        "0001-01-01T00:00:00Z",
        "2026-11-15T12:00:00",
        "2026-11-15",
        "soon",
        [],
        {},
        [[]],
        [None],
        [{}],
        {"": ""},
        {"a": None},
    ),
)


def damaged(name: str, samples: Sequence[bytes], seed: int) -> bytes:
    """`name`: of the parser, so that the same seed is another damage for each."""
    return mutated(samples, random.Random(f"{name} {seed}"))


def mutated(samples: Sequence[bytes], rng: random.Random) -> bytes:
    sample = rng.choice(samples)
    if sample[:1] in b"{[" and rng.random() < 0.7:
        return _by_value(sample, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        sample = _by_bytes(sample, rng)
    return sample


def _by_bytes(sample: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(sample) + 1)
    end = min(len(sample), at + rng.choice((1, 2, 8, 64)))
    match rng.randrange(7):
        case 0:
            return sample[:at] + bytes([rng.randrange(256)]) + sample[at + 1 :]
        case 1:
            return sample[:at] + sample[end:]
        case 2:
            return sample[:at] + sample[at:end] * rng.choice((2, 3, 50)) + sample[end:]
        case 3:
            return sample[:at]
        case 4:
            return sample[:at] + rng.choice(ODD) + sample[end:]
        case 5:
            return sample[:at] + rng.choice(ODD) + sample[at:]
        case _:
            return rng.randbytes(rng.randrange(200))


def _by_value(sample: bytes, rng: random.Random) -> bytes:
    """One value of a JSON document, or of a line of them, becomes another or is left out; it stays JSON."""
    before: list[bytes] = []
    try:
        tree = json.loads(sample)
    except ValueError:
        lines = sample.splitlines()
        *before, last = lines[: rng.randrange(1, len(lines) + 1)]
        tree = json.loads(last)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = _changed(tree, rng)
    changed = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return b"\n".join((*before, changed, b""))


def _changed(tree: Any, rng: random.Random) -> Any:
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(VALUES))
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    what = rng.random()
    if what < 0.05:
        del tree[key]
    elif what < 0.1 and isinstance(tree, dict):
        tree[rng.choice(("", "x", "gpukeeper.io/ttl", "gpukeeper.io/hold-until", "{x}"))] = copy.deepcopy(
            rng.choice(VALUES)
        )
    else:
        tree[key] = _changed(tree[key], rng)
    return tree
