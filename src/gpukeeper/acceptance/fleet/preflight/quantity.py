"""Quantities of Kubernetes: 8, 500m, 16Gi, 1k. Compared as numbers, never as text."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def quantity(text: str | None) -> Decimal | None:
    """None: there is none, or it cannot be read."""
    found = _FORM.fullmatch(text or "")
    if found is None:
        return None
    unit = found[2] or ""
    scale = Decimal(1024) ** _BINARY[unit] if unit in _BINARY else Decimal(10) ** _DECIMAL.get(unit, 0)
    return Decimal(found[1]) * scale


def whole(text: str | None) -> int:
    """Of devices: what is not announced is zero."""
    return int(quantity(text) or 0)


def gibibytes(amount: Decimal) -> str:
    return f"{float(amount) / 1024**3:.4g} GiB"
