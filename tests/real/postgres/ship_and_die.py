"""A program that ships one ledger until it is killed: python -m tests.real.postgres.ship_and_die LEDGER SETTINGS."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from gpukeeper.ledger.copy.shipper import CopySettings, Shipper

if __name__ == "__main__":
    shipper = Shipper(msgspec.json.decode(sys.argv[2], type=CopySettings), Path(sys.argv[1]))
    shipper.start()
    print("started", flush=True)
    threading.Event().wait()
