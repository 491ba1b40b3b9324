"""The workloads in a ledger, by path, for shell completion: one short query on the file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from gpukeeper.model.subject import Ref

PATIENCE = 0.2  # seconds; a user waits at a prompt
MOST = 2000
_PARTS = ("platform", "place", "kind", "name", "uid", "namespace")
_WORKLOADS = f"""
SELECT {", ".join(f"coalesce(json_extract(ref, '$.{part}'), '')" for part in _PARTS)} FROM present
WHERE json_extract(ref, '$.kind') NOT IN ('gpu', 'slice', 'node', 'disk') LIMIT {MOST}
"""  # noqa: S608 - constants only


def known_workloads(ledger: Path) -> list[str]:
    """Paths of what was there at the last pass. Raises sqlite3.Error, also where there is no ledger."""
    with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)) as connection:
        return [Ref(*row).path for row in connection.execute(_WORKLOADS)]
