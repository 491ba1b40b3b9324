"""A Ray cluster that runs jobs of ours: where it is; the launcher of acceptance runs; and passes on its nodes, with the
policy that is sent there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gpukeeper.acceptance.launchers.ray import WAIT, RayLauncher, RaySettings
from gpukeeper.clients.ray import PORT, RayJobsApi, known, read_token
from gpukeeper.config.load import load_file
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import busy
from gpukeeper.platforms.ray.state import answers_of
from gpukeeper.rollout.ray import AGAIN, DEADLINE, RayPasses, RayPassSettings
from gpukeeper.wiring.launch_hosts import check_options, span_option

ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's own names


def address(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, bool]:
    """Of the dashboard, and whether a person named it: only then a token is sent there."""
    if "address" in options:
        return options["address"], True
    for name in ADDRESSES:
        if environ.get(name, "").startswith(("http://", "https://")):
            return environ[name], True
    return f"http://127.0.0.1:{PORT}", False


LAUNCH_OPTIONS = ("address", "ca", "gpus", "master", "program", "python", "wait")


def ray_launcher(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> RayLauncher:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, LAUNCH_OPTIONS)
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


async def work(api: RayJobsApi, nodes: Sequence[str]) -> dict[str, str | Unknown | None]:
    """What runs on each of these nodes, by their ids; None: Ray lists nothing."""
    session = known(await api.state.version()).session
    if session is None:
        return dict.fromkeys(nodes, Unknown(f"Ray at {api.address} does not name its session"))
    answers = await answers_of(api.state, session)
    return {node: busy(node, answers) for node in nodes}


PASS_OPTIONS = ("address", "again", "ca", "deadline", "program", "python")


def ray_passes(options: Mapping[str, str]) -> RayPasses:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, PASS_OPTIONS)
    api = jobs_api(options, os.environ)
    settings = RayPassSettings(
        token=secrets.token_hex(8),
        python=options.get("python", "python3"),
        program=options.get("program", "gpukeeper"),
        deadline=span_option(options, "deadline", DEADLINE),
        again=span_option(options, "again", AGAIN),
    )
    return RayPasses(api, partial(work, api), settings)


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
