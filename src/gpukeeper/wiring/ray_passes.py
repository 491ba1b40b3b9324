"""Passes on the nodes of a Ray cluster, with its connection and the policy that is sent there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.config.load import load_file
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.rollout.ray import AGAIN, DEADLINE, RayPasses, RayPassSettings
from gpukeeper.wiring.launch_hosts import check_options, span_option
from gpukeeper.wiring.launch_ray import jobs_api

OPTIONS = ("address", "again", "ca", "deadline", "program", "python")


def ray_passes(options: Mapping[str, str]) -> RayPasses:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, OPTIONS)
    api = jobs_api(options, os.environ)
    settings = RayPassSettings(
        token=secrets.token_hex(8),
        python=options.get("python", "python3"),
        program=options.get("program", "gpukeeper"),
        deadline=span_option(options, "deadline", DEADLINE),
        again=span_option(options, "again", AGAIN),
    )
    return RayPasses(api, api.work, settings)


def policy_text(path: Path | None, *, act: bool) -> str:
    """Checked here: a mistake in it would be found on every node."""
    if path is None:
        raise UsageError("--on ray sends the policy to the nodes: name it with --policy FILE. Nothing was done.")
    loaded = load_file(path)
    if loaded.file.exemptions_from is not None:
        raise UsageError(f"{path}: exemptions_from is not sent to nodes. Write the exemptions in the policy itself.")
    if "ray" not in loaded.policy.scope:
        raise UsageError(f"{path}: its scope has no Ray. Write scope: {{ray: {{}}}}. Nothing was done.")
    if act and loaded.policy.mode is Mode.PLAN:
        raise UsageError(f"{path}: mode is plan, and only mode: enforce acts unattended. Nothing was done.")
    return path.read_text(encoding="utf-8")
