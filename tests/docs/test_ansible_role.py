"""The Ansible role: its variables are documented and checked, its commands exist. That it works: tests/real/systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.docs import commands
from tests.docs.markdown import ROOT
from tests.engines import has_ansible, require
from tests.real.ansible import installation as ansible

ROLE = ROOT / "deploy" / "ansible" / "roles" / "gpukeeper"
PAGE = ROOT / "docs" / "how-to" / "deploy-to-many-servers.md"


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def test_every_variable_is_documented_and_checked() -> None:
    defaults = read(ROLE / "defaults" / "main.yml")
    specified = read(ROLE / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: one["default"] for name, one in specified.items()} == defaults
    assert set(re.findall(r"^\| `(gpukeeper_\w+)` \|", PAGE.read_text(), re.MULTILINE)) == set(defaults)


def test_its_commands_exist_with_their_options() -> None:
    """The options of setup are put together from variables: all that the template has."""
    template = (ROLE / "tasks" / "setup.yml").read_text().partition("gpukeeper_setup_command: >-")[2]
    options = re.findall(r"'(--\w+)'", template.partition("block:")[0])
    assert options == ["--admins", "--preset", "--enforce", "--every", "--metrics"]
    flags = [word for one in options for word in ([one] if one == "--enforce" else [one, "x"])]
    for words in (
        ["setup", "host", *flags, "--plan", "--json"],
        ["setup", "host", *flags, "--yes", "--json"],
        ["setup", "remove", "--yes", "--json"],
        ["policy", "check", "x"],
    ):
        assert commands.why_wrong(words) == ""


@pytest.mark.slow
def test_ansible_lint_finds_nothing(tmp_path: Path) -> None:
    """In a copy: it writes a cache beside what it reads."""
    require("ansible", has_ansible())
    role = shutil.copytree(ROOT / "deploy" / "ansible", tmp_path / "ansible")
    command = [ansible.lint(), "--offline", "--nocolor", "--profile=production", "--project-dir=.", "site.yml", "roles"]
    linted = subprocess.run(command, cwd=role, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 failure(s), 0 warning(s)" in linted.stderr
