"""The section `gpu`: off by default, and an exporter's address that is one."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.policy import GpuSettings

SCOPE = "scope: {docker: {}}\n"


def settings(text: str) -> GpuSettings:
    return load_text(SCOPE + text, "policy.yaml").policy.gpu


def test_nothing_is_reset_unless_a_user_reports_it() -> None:
    assert settings("") == GpuSettings(reset=False, settle=timedelta(minutes=2), dcgm=None)
    assert settings("gpu: {reset: true, settle: 5m}").reset


@pytest.mark.parametrize(
    ("written", "read"),
    [("http://localhost:9400/metrics", "http://localhost:9400/metrics"), ("https://node-3", "https://node-3")],
)
def test_an_exporter_is_named_by_its_address(written: str, read: str) -> None:
    assert settings(f"gpu: {{dcgm: {written!r}}}").dcgm == read
    assert settings("gpu: {dcgm: none}").dcgm is None


@pytest.mark.parametrize("written", ["localhost:9400", "file:///etc/passwd", "http://", "9400", "http://ann:x@node-3"])
def test_what_is_no_address_is_a_problem(written: str) -> None:
    with pytest.raises(PolicyError, match="is not a valid URL"):
        settings(f"gpu: {{dcgm: {written!r}}}")
