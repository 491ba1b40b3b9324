"""The network cards of this node that collectives can use, as the kernel describes them. What is unknown stays so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gpukeeper.acceptance.fleet.group_jobs import Fabric

SYS = Path("/sys")
_RATE = re.compile(r"(\d{1,5}(?:\.\d)?) Gb/sec")


def read_fabric(sys: Path = SYS) -> Fabric:
    """RDMA ports that are active come first; else Ethernet cards with a link. Of several speeds the most frequent."""
    rdma = list(_rdma(sys))
    if rdma:
        (kind, gbits), cards = Counter(rdma).most_common(1)[0]
        return Fabric(kind=kind, gbits=gbits, cards=cards)
    speeds = list(_ethernet(sys))
    if not speeds:
        return Fabric()
    gbits = max(speeds)
    return Fabric(kind="ethernet", gbits=gbits, cards=speeds.count(gbits))


def _rdma(sys: Path) -> Iterator[tuple[str, float]]:
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        found = _RATE.match(_text(port / "rate"))
        if "ACTIVE" in _text(port / "state") and found:
            layer = _text(port / "link_layer").strip().lower()
            yield ("infiniband" if layer == "infiniband" else "ethernet"), float(found[1])


def _ethernet(sys: Path) -> Iterator[float]:
    """Only real cards: virtual ones report a speed that no wire has."""
    for card in sorted(sys.glob("class/net/*")):
        text = _text(card / "speed").strip()
        if (card / "device").exists() and text.isdigit() and int(text) > 0:
            yield int(text) / 1000


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a card without a link reports EINVAL
        return ""
