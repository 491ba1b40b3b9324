"""`gpukeeper accept preflight`: what would prevent an acceptance run on the nodes of an engine, and how to fix it."""

from __future__ import annotations

import asyncio
import getpass
import secrets
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import typer

from gpukeeper.acceptance.fleet.preflight.facts import EXIT, ClusterRequest, Finding, verdict_of
from gpukeeper.acceptance.launchers.trial import TrialRequest
from gpukeeper.interfaces.cli.accept_remote import engine_options
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import colours, width_of, wrapped
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.words import plain
from gpukeeper.wiring.preflight import docker, kubernetes, ray, ssh

ENGINES = ("docker", "kubernetes", "ray", "ssh")
INDENT = " " * 14


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """The run that is to be prepared, with the options of `gpukeeper accept --on`."""

    on: Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"The engine: {', '.join(ENGINES)}.")] = ""
    nodes: Annotated[
        str,
        typer.Option("--nodes", metavar="NODES", help="all (default), names with commas, or a label selector."),
    ] = "all"
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="Image of the run.")] = ""
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, metavar="N", help="GPUs of each node. Default: all.")
    ] = None
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="Namespace of the run. Default: that of the kubeconfig.")
    ] = ""
    context: Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")] = ""
    pull_secret: Annotated[
        list[str] | None,
        typer.Option("--pull-secret", metavar="NAME", help="imagePullSecret of the run; may be repeated."),
    ] = None
    form: Annotated[
        str, typer.Option("--as", metavar="FORM", help="Objects of the run: job (default), daemonset, statefulset, …")
    ] = "job"
    shm: Annotated[str, typer.Option("--shm", metavar="SIZE", help="Size of /dev/shm.")] = "16Gi"
    rdma: Annotated[
        str, typer.Option("--rdma", metavar="RESOURCE", help="RDMA resource that the run requests, such as rdma/hca.")
    ] = ""
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Also start a pod with one GPU that prints what is there. Removed afterwards."),
    ] = False
    trial_on: Annotated[
        str, typer.Option("--trial-on", metavar="NODES", help="A trial on each of these nodes: all, or names.")
    ] = ""
    trial_within: Annotated[str, typer.Option("--trial-within", metavar="DURATION", help="Time limit of a trial.")] = (
        "5m"
    )
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="Also what one run over all nodes needs: with ssh, that all hosts reach the first."
        ),
    ] = False
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Of the engine, as for a run; may be repeated."),
    ] = None
    json: o.Json = False


@o.with_options
def preflight(wanted: PreflightOptions) -> None:
    """Check what would prevent a run on the nodes of an engine. Exit code 0: nothing, 4: a FAIL, 5: could not check.

    Each finding has the command that fixes it. Changes nothing without --trial."""
    findings = asyncio.run(_interruptible(_checked(wanted)))
    verdict = verdict_of(findings)
    if wanted.json:
        show.as_json("preflight", {"engine": wanted.on, "verdict": verdict, "findings": findings})
    else:
        print_findings(findings)
        typer.echo(f"\n{_summary(findings, verdict)}")
    raise typer.Exit(EXIT[verdict])


def _checked(wanted: PreflightOptions) -> Coroutine[Any, Any, tuple[Finding, ...]]:
    if wanted.on not in ENGINES:
        raise UsageError(f'--on "{wanted.on}" is not an engine. Name one: {", ".join(ENGINES)}')
    if wanted.on != "kubernetes" and (wanted.trial or wanted.trial_on):
        raise UsageError("--trial is only for --on kubernetes")
    if wanted.on not in ("kubernetes", "ssh") and wanted.together:
        raise UsageError("--together is only for --on kubernetes and --on ssh")
    if wanted.on not in ("ray", "ssh") and wanted.option:
        raise UsageError("--option is only for --on ray and --on ssh")
    if wanted.on == "docker":
        return docker(wanted.image, wanted.shm)
    names, selector = selected(wanted.nodes)
    if wanted.on == "ray":
        return ray(names, selector, engine_options(wanted.option, None), wanted.gpus_per_node)
    if wanted.on == "ssh":
        if selector:
            raise UsageError("hosts have no labels; name them: --nodes HOST,HOST or --option hosts=FILE")
        found = engine_options(wanted.option, None)
        return ssh(names, found, wanted.gpus_per_node, wanted.shm, together=wanted.together)
    cluster = ClusterRequest(
        namespace=wanted.namespace,
        image=wanted.image,
        pull_secrets=tuple(wanted.pull_secret or ()),
        nodes=names,
        selector=selector,
        gpus_per_node=wanted.gpus_per_node,
        shm=wanted.shm,
        rdma=wanted.rdma,
        form=wanted.form,
        together=wanted.together,
    )
    trial = TrialRequest(
        run=f"preflight-{secrets.token_hex(4)}",
        owner=getpass.getuser(),
        cluster=cluster,
        nodes=tuple(part.strip() for part in wanted.trial_on.split(",") if part.strip()),
        deadline_s=_seconds(wanted.trial_within),
    )
    return kubernetes(trial, wanted.context, trial=wanted.trial or bool(trial.nodes))


async def _interruptible(work: Coroutine[Any, Any, tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """SIGTERM ends it as Ctrl-C does: the pods of a trial are removed before it exits."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _seconds(text: str) -> float:
    try:
        return reading.span(text).total_seconds()
    except ValueError as error:
        raise UsageError(f"--trial-within {text}: {error}. Write it like 90s or 5m.") from error


def selected(nodes: str) -> tuple[tuple[str, ...], str]:
    """Names or a selector: a name of a node has neither = nor !, parentheses or spaces."""
    if nodes == "all":
        return (), ""
    if any(sign in nodes for sign in "=!( "):
        return (), nodes
    return tuple(name for part in nodes.split(",") if (name := part.strip())), ""


def print_findings(findings: Sequence[Finding]) -> None:
    """By group. Sentences are wrapped, commands are not: they can be copied."""
    for number, (group, some) in enumerate(groupby(findings, key=lambda one: one.group)):
        typer.echo(f"{chr(10) if number else ''}{group}")
        for one in some:
            first, *more = wrapped(plain(f"{one.message} [{one.code}]"), _width())
            typer.echo(f"{_verdict(one.verdict)}{first}", color=colours(sys.stdout))
            for line in more:
                typer.echo(INDENT + line)
            for command in one.fix:
                typer.echo(f"{INDENT}$ {plain(command)}")


def _width() -> int | None:
    width = width_of(sys.stdout)
    return None if width is None else max(24, width - len(INDENT))


def _verdict(verdict: Grade) -> str:
    word = verdict.value.ljust(len(INDENT))
    return typer.style(word, fg=show.COLOURS[verdict]) if colours(sys.stdout) else word


def _summary(findings: Sequence[Finding], verdict: Grade) -> str:
    counts = [f"{sum(one.verdict is grade for one in findings)} {grade}" for grade in EXIT]
    ends = {
        Grade.PASS: "nothing would prevent the run",
        Grade.WARN: "the run can start; read the warnings",
        Grade.FAIL: "fix each FAIL before the run",
        Grade.INCONCLUSIVE: "something could not be checked",
    }
    return f"{verdict}: {ends[verdict]} ({', '.join(counts)})."
