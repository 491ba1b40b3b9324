"""`gpukeeper policy try`: apply a policy to a hypothetical workload and show the timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer

from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.interfaces.terminal import completion, show
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.model.words import in_words
from gpukeeper.views.trial import PolicyTrial, WorkloadWords
from gpukeeper.wiring.hypothetical import WorkloadDescription, read_description, try_policy


class WorkloadOptions(WorkloadWords, frozen=True, kw_only=True):
    """The same words, each with its flag."""

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
        str,
        typer.Option("--class", metavar="NAME", help="Class. Default: by match, else as recognized by the platform."),
    ] = ""
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the workload.")] = "example"
    label: Annotated[list[str], typer.Option("--label", metavar="KEY=VALUE", help="Label; may be repeated.")] = (
        msgspec.field(default_factory=list)
    )
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="Container image.")] = ""
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="Kubernetes kind: job, trainjob, pod, … Default: job.")
    ] = ""
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Kubernetes namespace.")] = ""
    environment: Annotated[
        str,
        typer.Option("--environment", metavar="NAME", help="Environment, one of `environments` in the policy."),
    ] = ""
    owner: Annotated[str, typer.Option("--owner", metavar="USER", help="Owner. Default: unknown.")] = ""
    group: Annotated[
        str,
        typer.Option("--group", metavar="NAME", help="Group of the owner, in addition to those in the policy."),
    ] = ""
    gpus: Annotated[int, typer.Option("--gpus", min=0, max=1024, metavar="N", help="Number of GPUs.")] = 1
    state: Annotated[
        str,
        typer.Option(
            "--state",
            metavar="STATE",
            help="running, ended or created. Default: running, or as implied by other options.",
        ),
    ] = ""
    outcome: Annotated[
        str,
        typer.Option(
            "--outcome",
            metavar="OUTCOME",
            help="Outcome of ended work: succeeded (default), failed or stopped.",
            autocompletion=completion.outcomes,
        ),
    ] = ""
    running_for: Annotated[
        str, typer.Option("--running-for", metavar="DURATION", help="Time since the start: 2h, 3d, …")
    ] = ""
    idle_for: Annotated[
        str, typer.Option("--idle-for", metavar="DURATION", help="Idle time so far: 20m, … Default: idle from now on.")
    ] = ""
    busy: Annotated[bool, typer.Option("--busy", help="The GPUs are in use all the time.")] = False
    ended_since: Annotated[
        str, typer.Option("--ended-since", metavar="DURATION", help="Time since the end: 2h, 3d, …")
    ] = ""
    ttl: Annotated[str, typer.Option("--ttl", metavar="DURATION", help="The workload's own TTL after its end.")] = ""
    hold: Annotated[
        str, typer.Option("--hold", metavar="DURATION", help="The owner holds it for this time, from now on.")
    ] = ""
    demand: Annotated[
        bool, typer.Option("--demand", help="Assume that GPUs are scarce; see `demand` in the policy.")
    ] = False

    def named(self, field: str) -> str:
        return f"--{field.replace('_', '-')}"


@o.with_options
def try_(*, policy: o.PolicyFile = None, options: WorkloadOptions, json: o.Json = False) -> None:
    """Apply a policy to a hypothetical workload. Shows its class, and when it would be warned, stopped and removed."""
    described = read_description(options)
    loaded = load_policy(policy)
    found = try_policy(loaded, described, datetime.now(UTC).replace(second=0, microsecond=0))
    if json:
        show.as_json("policy-try", found)
    else:
        _print(loaded, described, found)


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
    words, subject, now = described.words, found.workload, found.at
    ran = f" for {in_words(now - subject.started)}" if isinstance(subject.started, datetime) else ""
    state = f"{subject.outcome} {in_words(described.ended_since)} ago" if subject.outcome else f"{subject.state}{ran}"
    idle = ", in use" if words.busy else f", idle for {in_words(described.idle_for)}" if described.idle_for else ""
    groups = f" (group {', '.join(found.groups)})" if found.groups else ""
    return [
        ("workload", subject.ref.path),
        ("class", f"{found.class_} ({found.class_because})"),
        ("owner", f"{words.owner or 'unknown'}{groups}"),
        ("state", f"{state}{idle}, {words.gpus} GPU{'' if words.gpus == 1 else 's'}"),
        ("now", f"{found.decision.action}: {found.decision.reason}"),
    ]


def _what(one: UpcomingAction) -> str:
    """A second warning is shown as the second; what is kept from then on is reported."""
    if one.action.value == "keep":
        return "report"
    return f"{one.action} {one.stage}" if one.stage else str(one.action)


def _when(at: datetime, now: datetime) -> str:
    return f"in {in_words(at - now)}" if at > now else "now"
