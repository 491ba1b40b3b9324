"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a busy machine.
settings.register_profile("tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
