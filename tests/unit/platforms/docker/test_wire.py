"""Times and answers in the engine's own words."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.docker import (
    ContainerSummary,
    DiskUsage,
    EngineEvent,
    ImageInspected,
    ImageSummary,
    Info,
    PathChange,
    when,
)
from gpukeeper.model.unknown import Unknown
from tests.unit.platforms.docker.examples import DOCKER, PODMAN, decoded, recorded


@pytest.mark.parametrize("text", ["", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000000001Z"])
def test_the_engines_zero_is_never(text: str) -> None:
    assert when(text) is None


@pytest.mark.parametrize(
    ("text", "microsecond"),
    [
        ("2026-11-15T07:01:22.32253366Z", 322533),
        ("2026-11-15T07:01:22.322533666Z", 322533),
        ("2026-11-15T07:01:22.3Z", 300000),
        ("2026-11-15T07:01:22Z", 0),
        ("2026-11-15T08:01:22+01:00", 0),
    ],
)
def test_trimmed_nanoseconds_are_read(text: str, microsecond: int) -> None:
    assert when(text) == datetime(2026, 11, 15, 7, 1, 22, microsecond, tzinfo=UTC)


@pytest.mark.parametrize("text", ["yesterday", "2026-11-15T07:01:22", "2026-13-15T07:01:22Z"])
def test_what_is_no_time_is_unknown_and_never_the_year_one(text: str) -> None:
    assert isinstance(when(text), Unknown)


@given(st.text())
def test_no_text_breaks_reading_a_time(text: str) -> None:
    found = when(text)
    assert found is None or isinstance(found, Unknown) or found.tzinfo is not None


@pytest.mark.parametrize("whole", [DOCKER, PODMAN], ids=["docker", "podman"])
def test_every_recorded_container_is_read(whole: dict[str, dict[str, object]]) -> None:
    for name, told in whole.items():
        found = decoded(told)
        assert found.plain_name == {"sized": "exited1", "anonmount": "anon"}.get(name, name)
        assert len(found.id) == 64


@pytest.mark.parametrize("name", ["docker_20_10_answers", "podman_4_3_answers"])
def test_every_recorded_answer_is_read(name: str) -> None:
    told = recorded(name)
    types = {
        "list": list[ContainerSummary],
        "images": list[ImageSummary],
        "image": ImageInspected,
        "df": DiskUsage,
        "info": Info,
        "changes": list[PathChange],
        "events": list[EngineEvent],
    }
    for part, type_ in types.items():
        if part in told:
            assert msgspec.json.decode(json.dumps(told[part]), type=type_)


def test_an_image_id_is_written_alike_in_every_list() -> None:
    """How many containers use an image is counted by it."""
    for name, containers in (("docker_20_10_answers", DOCKER), ("podman_4_3_answers", PODMAN)):
        told = recorded(name)
        ids = {one["Id"] for one in told["images"]}
        assert {one["ImageID"] for one in told["list"]} <= ids
        assert {decoded(one).image for one in containers.values()} <= ids
