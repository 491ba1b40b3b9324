"""Environment variables that more than one layer reads."""

from __future__ import annotations

FLEET = "GPUKEEPER_FLEET"  # folder:PATH[:PATH…] plays with places of files instead of this machine
