"""Engines that an acceptance run can be launched on. One line, one engine; its module is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from gpukeeper.acceptance.fleet.ports import Launcher
from gpukeeper.config.problems import did_you_mean
from gpukeeper.model.errors import UsageError

LAUNCHERS = {
    "docker": "gpukeeper.wiring.launch_hosts:docker",
    "kubernetes": "gpukeeper.wiring.launch_kubernetes:launcher",
    "ray": "gpukeeper.wiring.launch_ray:launcher",
    "simulated": "gpukeeper.wiring.launch_simulated:launcher",
    "ssh": "gpukeeper.wiring.launch_hosts:ssh",
}


def open_launcher(engine: str, options: Mapping[str, str]) -> Launcher:
    """`options`: of the engine (namespace, hosts, …). UsageError: the engine or one of them is not known."""
    if engine not in LAUNCHERS:
        raise UsageError(f'--on "{engine}": unknown engine. {did_you_mean(engine, sorted(LAUNCHERS))}')
    module, _, name = LAUNCHERS[engine].partition(":")
    made = cast("Callable[[Mapping[str, str]], Launcher]", getattr(import_module(module), name))
    return made(options)
