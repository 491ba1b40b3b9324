"""`gpukeeper policy try`: apply a policy to a hypothetical workload and show the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.interfaces.terminal import completion, show
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.model.durations import in_words
from gpukeeper.views.trial import PolicyTrial, WorkloadWords
from gpukeeper.wiring.hypothetical import WorkloadDescription, read_description, try_policy

Span = str | None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The workload in words."""

    platform: Annotated[
        str,
        typer.Option(
            "--platform",
            metavar="PLATFORM",
            help="Platform, or platform and place: docker, docker/node-3, kubernetes.",
            autocompletion=completion.platforms,
        ),
    ] = "docker"
    class_: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="Class. Default: by match, else as recognized by the platform."),
    ] = None
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the workload.")] = "example"
    label: Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label; may be repeated.")] = (
        None
    )
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="Container image.")] = None
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Kubernetes kind: job, trainjob, pod, … Default: job.")
    ] = None
    namespace: Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Kubernetes namespace.")] = None
    environment: Annotated[
        str | None,
        typer.Option("--environment", metavar="NAME", help="Environment, one of `environments` in the policy."),
    ] = None
    owner: Annotated[str | None, typer.Option("--owner", metavar="USER", help="Owner. Default: unknown.")] = None
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="NAME", help="Group of the owner, in addition to those in the policy."),
    ] = None
    gpus: Annotated[int, typer.Option("--gpus", min=0, max=1024, metavar="N", help="Number of GPUs.")] = 1
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="running, ended or created. Default: running, or as implied by other options.",
        ),
    ] = None
    outcome: Annotated[
        str | None,
        typer.Option(
            "--outcome",
            metavar="OUTCOME",
            help="Outcome of ended work: succeeded (default), failed or stopped.",
            autocompletion=completion.outcomes,
        ),
    ] = None
    running_for: Annotated[
        Span, typer.Option("--running-for", metavar="DURATION", help="Time since the start: 2h, 3d, …")
    ] = None
    idle_for: Annotated[
        Span, typer.Option("--idle-for", metavar="DURATION", help="Idle time so far: 20m, … Default: idle from now on.")
    ] = None
    busy: Annotated[bool, typer.Option("--busy", help="The GPUs are in use all the time.")] = False
    ended_since: Annotated[
        Span, typer.Option("--ended-since", metavar="DURATION", help="Time since the end: 2h, 3d, …")
    ] = None
    ttl: Annotated[Span, typer.Option("--ttl", metavar="DURATION", help="The workload's own TTL after its end.")] = None
    hold: Annotated[
        Span, typer.Option("--hold", metavar="DURATION", help="The owner holds it for this time, from now on.")
    ] = None
    demand: Annotated[
        bool, typer.Option("--demand", help="Assume that GPUs are scarce; see `demand` in the policy.")
    ] = False


@o.with_options
def try_(*, policy: o.PolicyFile = None, options: WorkloadOptions, json: o.Json = False) -> None:
    """Apply a policy to a hypothetical workload. Shows its class, and when it would be warned, stopped and removed."""
    described = read_description(_words(options))
    loaded = load_policy(policy)
    found = try_policy(loaded, described, datetime.now(UTC).replace(second=0, microsecond=0))
    if json:
        show.as_json("policy-try", found)
    else:
        _print(loaded, described, found)


def _words(options: WorkloadOptions) -> WorkloadWords:
    given = {name: value for name, value in vars(options).items() if value is not None}
    return WorkloadWords(**{**given, "label": tuple(options.label or ())})


def _print(loaded: Loaded, described: WorkloadDescription, found: PolicyTrial) -> None:
    show.table(_facts(described, found))
    typer.echo("")
    rows = [(_when(one.at, found.at), _what(one), one.rule, one.reason) for one in found.timeline]
    show.table(rows, head=("when", "action", "rule", "reason"))
    show.text(("\n" if rows else "") + found.end)
    show.text("\nAssumes:")
    for words in found.assumes:
        show.text(f"  {words}")
    print_message(f"Policy: {loaded.source} ({loaded.policy.preset}, mode {loaded.policy.mode}).")


def _facts(described: WorkloadDescription, found: PolicyTrial) -> list[tuple[str, str]]:
    subject, now = found.workload, found.at
    ran = f" for {in_words(now - subject.started)}" if isinstance(subject.started, datetime) else ""
    state = f"{subject.outcome} {in_words(described.ended_since)} ago" if subject.outcome else f"{subject.state}{ran}"
    idle = ", in use" if described.busy else f", idle for {in_words(described.idle_for)}" if described.idle_for else ""
    groups = f" (group {', '.join(found.groups)})" if found.groups else ""
    return [
        ("workload", subject.ref.path),
        ("class", f"{found.class_} ({found.class_because})"),
        ("owner", f"{described.owner or 'unknown'}{groups}"),
        ("state", f"{state}{idle}, {described.gpus} GPU{'' if described.gpus == 1 else 's'}"),
        ("now", f"{found.decision.action}: {found.decision.reason}"),
    ]


def _what(one: UpcomingAction) -> str:
    """A second warning is shown as the second; what is kept from then on is reported."""
    if one.action.value == "keep":
        return "report"
    return f"{one.action} {one.stage}" if one.stage else str(one.action)


def _when(at: datetime, now: datetime) -> str:
    return f"in {in_words(at - now)}" if at > now else "now"
