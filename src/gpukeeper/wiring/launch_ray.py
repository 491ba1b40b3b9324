"""The launcher of acceptance runs on a Ray cluster, with its connection."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.acceptance.launchers.ray import WAIT, RayLauncher, RaySettings
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.state import read_token
from gpukeeper.wiring.launch_hosts import check_options, span_option
from gpukeeper.wiring.ray_jobs import RayJobsApi, address

OPTIONS = ("address", "ca", "gpus", "master", "program", "python", "wait")


def launcher(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> RayLauncher:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, OPTIONS)
    if options.get("gpus", "none") != "none":
        raise UsageError(f'option gpus="{options["gpus"]}" can only be "none"; without it a node gets all its GPUs')
    settings = RaySettings(
        python=options.get("python", "python3"),
        program=options.get("program", "gpukeeper"),
        gpus="gpus" not in options,
        master=options.get("master", ""),
        wait=span_option(options, "wait", WAIT),
        token=lambda: secrets.token_hex(8),
    )
    return RayLauncher(jobs_api(options, environ), settings)


def jobs_api(options: Mapping[str, str], environ: Mapping[str, str]) -> RayJobsApi:
    where, named = address(options, environ)
    token = read_token(environ, Path(environ.get("HOME", "/"))) if named else None
    if isinstance(token, Unknown):
        raise UsageError(token.why)
    return RayJobsApi(where, token, ca=options.get("ca", ""))
