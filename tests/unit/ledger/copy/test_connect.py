"""Addresses without passwords, secrets from files, names that fit a role."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.ledger.copy.admin import migrations
from gpukeeper.ledger.copy.connect import problem_of_address, problem_of_machine, shown
from gpukeeper.ledger.files import read_secret
from gpukeeper.model.errors import UsageError


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://gpukeeper_machine_node-1@db.example/gpukeeper",
        "postgres://db/gpukeeper?sslmode=verify-full",
        "postgresql://a@db-1,db-2/gpukeeper?target_session_attrs=read-write",
        "postgresql:///gpukeeper?host=/run/postgresql",
    ],
)
def test_addresses(address: str) -> None:
    assert problem_of_address(address) is None


@pytest.mark.parametrize(
    "address",
    ["postgresql://a:secret@db/x", "postgresql://db/x?password=secret", "mysql://db/x", "", "postgresql://[x"],
)
def test_no_addresses(address: str) -> None:
    assert problem_of_address(address)


def test_what_is_shown_of_an_address_has_no_user() -> None:
    assert shown("postgresql://ann@db.example/gpukeeper?x=y") == "db.example/gpukeeper"


@pytest.mark.parametrize(
    ("name", "good"),
    [("node-1", True), ("a" * 45, True), ("a" * 46, False), ("Node", False), ("", False), ("a b", False)],
)
def test_names_of_machines(name: str, good: bool) -> None:
    assert (problem_of_machine(name) is None) is good


def test_a_secret_is_the_first_line_of_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("s3cret\nmore\n")
    path.chmod(0o600)
    assert read_secret(path) == "s3cret"
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o602)
    with pytest.raises(UsageError, match="may be written to by others"):
        read_secret(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(UsageError, match="contains no secret"):
        read_secret(path)
    with pytest.raises(UsageError, match="could not be read"):
        read_secret(tmp_path / "missing")


def test_migrations_are_numbered_and_explained() -> None:
    assert [one.number for one in migrations()] == list(range(1, len(migrations()) + 1))
    assert all(one.sql.startswith("-- ") for one in migrations()), "each opens with what it is"


def test_without_a_fleet_database_the_daemon_does_not_load_the_driver() -> None:
    code = "import sys, gpukeeper.interfaces.daemon.serve; sys.exit('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
