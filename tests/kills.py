"""How often a test kills gpukeeper at random moments. GPUKEEPER_TEST_KILLS=100 takes some minutes on each engine."""

from __future__ import annotations

import os

KILLS = int(os.environ.get("GPUKEEPER_TEST_KILLS", "20"))
