"""How often a test kills gpukeeper at random moments. Few: `tests/halt.py` covers the exact points of a step, and seeds
are fixed. GPUKEEPER_TEST_KILLS=100 takes some minutes on each engine."""

from __future__ import annotations

import os

KILLS = int(os.environ.get("GPUKEEPER_TEST_KILLS", "5"))
