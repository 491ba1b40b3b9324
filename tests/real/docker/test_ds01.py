"""A host of the DS01 container lifecycle after `policy import`: the main kinds on a real engine, over a week.

Every kind is in tests/unit/config/importing/ds01_table.py, evaluated by the rules alone.
"""

from __future__ import annotations

from pathlib import Path

import gpukeeper.config.importing.ds01 as importer
from tests.real.docker import programs
from tests.real.docker.harness import SOMEBODY, SOMEBODY_ELSE, Harness
from tests.real.docker.private_engine import DockerEngine
from tests.unit.config.importing import ds01_table as table

LIMITS = Path(table.__file__).parent / "ds01_host" / "resource-limits.yaml"
MEMBERS = {"student": "", "researcher": "", "faculty": SOMEBODY, "admin": ""}


def test_a_week_of_a_ds01_host_after_the_import(docker: DockerEngine) -> None:
    """Not used from the start on: after 30m of grace, 30m for a student's `docker run` and 2h for faculty."""
    labels = {
        "faculty": table.made(SOMEBODY),
        "student": table.wrapped(SOMEBODY_ELSE, container_type="docker"),
        "dev": {**table.wrapped(SOMEBODY_ELSE, container_type="devcontainer"), **table.dev(SOMEBODY_ELSE)},
        "protected": {**table.wrapped(SOMEBODY_ELSE, container_type="docker"), "ds01.protected": "true"},
        "ownerless": {},
    }
    for name, given in labels.items():
        docker.run(name, gpus=[0], labels=given, cmd=programs.trapping_shell())
    docker.run("web", labels=labels["student"], cmd=programs.trapping_shell())
    beside = importer.Companions(members=MEMBERS)
    imported = importer.import_limits(LIMITS.read_text(), LIMITS.name, beside).policy
    harness = Harness(docker, imported.replace("mode: plan", "mode: enforce", 1))
    classes = {name: one.class_ for name, one in harness.subjects().items() if name in {*labels, "web"}}
    assert classes == {
        "faculty": "managed",
        "student": "docker",
        "dev": "devcontainer",
        "protected": "docker",
        "ownerless": "unknown",
        "web": "without-gpu",
    }
    harness.again()
    assert passes(docker, harness, 55) == {*labels, "web"}  # within the limit of all
    assert passes(docker, harness, 10, 25) == {*labels, "web"} - {"student"}
    assert passes(docker, harness, 90, 25) == {"dev", "protected", "ownerless", "web"}
    assert passes(docker, harness, 24 * 60 * 6) == {"dev", "protected", "ownerless", "web"}
    assert passes(docker, harness, 24 * 60, 25, 25) == {"protected", "web"}  # after 168h


def passes(docker: DockerEngine, harness: Harness, *minutes: int) -> set[str]:
    """The containers that run after a pass at each of these times, each so long after the one before."""
    for later in minutes:
        harness.later(minutes=later)
        for name in harness.subjects():
            if docker.inspect(name) is not None and docker.state(name) == "running" and name != "web":
                harness.measured(name, minutes=min(later + 200, 300))
        harness.again(), harness.again()
    kinds = ("faculty", "student", "dev", "protected", "ownerless", "web")
    return {name for name in kinds if docker.inspect(name) is not None and docker.state(name) == "running"}
