"""`gpukeeper fleet-db`, as an administrator runs it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli.fleet import Fleet
from tests.docs.markdown import ROOT
from tests.real.postgres.server import Server

JSON_PAGE = ROOT / "docs" / "reference" / "json.md"


def documented(schema: str) -> set[str]:
    section = JSON_PAGE.read_text().partition(f"## gpukeeper/{schema}/v1\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_a_database_is_set_up_step_by_step(shared: Server, fleet: Fleet, tmp_path: Path) -> None:
    name = f"cli_{os.getpid()}"
    shared.sql(f'CREATE DATABASE "{name}"', database="postgres")
    address = shared.address(database=name)
    web, secret = tmp_path / "web.password", tmp_path / "node-1.password"

    assert "this is not a fleet database yet" in fleet.run("fleet-db", "status", address).err
    made = fleet.run("fleet-db", "init", address, "--web-password-file", str(web), "--retention", "90d")
    assert made.code == 0, made.err
    assert "Schema" in made.out
    assert web.stat().st_mode & 0o777 == 0o600
    again = fleet.run("fleet-db", "migrate", address)
    assert "up to date" in again.out
    migrated = fleet.run("fleet-db", "migrate", address, "--json").json()
    assert migrated.pop("schema") == "gpukeeper/fleet-db-migrate/v1"
    assert set(migrated) == documented("fleet-db-migrate")

    added = fleet.run("fleet-db", "add-machine", address, "node-1", "--machine-password-file", str(secret))
    assert "gpukeeper_machine_node-1" in added.out
    assert secret.read_text().strip() not in added.out
    added = fleet.run("fleet-db", "add-machine", address, "node-1", "--machine-password-file", str(secret), "--json")
    document = added.json()
    assert document.pop("schema") == "gpukeeper/fleet-db-machine/v1"
    assert set(document) == documented("fleet-db-machine")

    status = fleet.run("fleet-db", "status", address)
    assert status.code == 0, status.err
    assert "node-1" in status.out
    assert "90d" in status.out
    document = fleet.run("fleet-db", "status", address, "--json").json()
    assert document.pop("schema") == "gpukeeper/fleet-db-status/v1"
    assert set(document) == documented("fleet-db-status")

    own = shared.address("gpukeeper_machine_node-1", name)
    fleet.write_policy(
        f"scope: {{docker: {{}}}}\nfleet: {{copy_to: {own!r}, password_file: {secret}, machine: node-1}}\n"
    )
    configured = fleet.run("fleet-db", "status", "--json")
    assert configured.code == 0, configured.err
    assert [one["name"] for one in configured.json()["database"]["machines"]] == ["node-1"]


def test_mistakes_are_sentences(shared: Server, fleet: Fleet, tmp_path: Path) -> None:
    address, secret = shared.address(database="postgres"), str(tmp_path / "x")
    bad = fleet.run("fleet-db", "add-machine", address, "Node 1", "--machine-password-file", secret)
    assert (bad.code, "not a name for a machine" in bad.err) == (2, True)
    bad = fleet.run("fleet-db", "status", "postgresql://ann:secret@db/x")
    assert bad.code == 2
    assert "contains a password" in bad.err
    assert "secret" not in bad.err
    bad = fleet.run("fleet-db", "status", "mysql://db/x")
    assert (bad.code, "postgresql://" in bad.err) == (2, True)
    bad = fleet.run("fleet-db", "status", f"postgresql://ann@/x?host={tmp_path}")
    assert (bad.code, "could not be used" in bad.err) == (1, True)
    bad = fleet.run("fleet-db", "status")
    assert (bad.code, "fleet.copy_to" in bad.err) == (2, True)
