"""`gpukeeper policy try`: apply a policy to a hypothetical workload and show the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.interfaces.cli.hypothetical import STATES, WorkloadDescription, hypothetical_workload
from gpukeeper.interfaces.terminal import completion, show
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import span
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Outcome, State
from gpukeeper.views.trial import TrialView, trial

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
    described = _described(options)
    loaded = load_policy(policy)
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    assumed, applied = hypothetical_workload(described, loaded.policy, now)
    found = trial(applied, assumed, now)
    if json:
        _print_json(loaded, described, found)
    else:
        _print(loaded, described, found)


def _described(options: WorkloadOptions) -> WorkloadDescription:
    platform, _, place = options.platform.partition("/")
    ended = options.ended_since is not None or options.outcome is not None
    return WorkloadDescription(
        platform=platform,
        place=place or None,
        namespace=options.namespace,
        kind=options.kind,
        name=options.name,
        class_=options.class_,
        image=options.image,
        labels=_labels(options.label or ()),
        owner=options.owner,
        group=options.group,
        environment=options.environment,
        gpus=options.gpus,
        state=_state(options.state, ended=ended),
        outcome=_outcome(options.outcome),
        running_for=span(options.running_for, "--running-for") or timedelta(),
        idle_for=span(options.idle_for, "--idle-for") or timedelta(),
        ended_since=span(options.ended_since, "--ended-since") or timedelta(),
        ttl=span(options.ttl, "--ttl"),
        hold=span(options.hold, "--hold"),
        busy=options.busy,
        demand=options.demand,
    )


def _labels(written: Iterable[str]) -> dict[str, str]:
    wrong = [one for one in written if not one.partition("=")[0]]
    if wrong:
        raise UsageError(f'--label "{wrong[0]}" has no key. Write it like team=vision, or team.')
    return {key: value for key, _, value in (one.partition("=") for one in written)}


def _state(written: str | None, *, ended: bool) -> State:
    if written is None:
        return State.ENDED if ended else State.RUNNING
    if written not in STATES:
        raise UsageError(f'--state "{written}" is not one of: {", ".join(STATES)}')
    return State(written)


def _outcome(written: str | None) -> Outcome | None:
    if written is not None and written not in tuple(Outcome):
        raise UsageError(f'--outcome "{written}" is not one of: {", ".join(Outcome)}')
    return None if written is None else Outcome(written)


def _print_json(loaded: Loaded, described: WorkloadDescription, found: TrialView) -> None:
    head = {"source": loaded.source, "digest": loaded.policy.digest, "mode": loaded.policy.mode}
    body = {
        "policy": head,
        "at": found.at,
        "workload": found.subject,
        "class": found.class_,
        "class_because": _because(loaded, described, found),
        "groups": found.groups,
        "decision": found.now,
        "timeline": found.timeline,
        "end": found.end,
        "assumes": found.assumes,
    }
    show.as_json("policy-try", body)


def _print(loaded: Loaded, described: WorkloadDescription, found: TrialView) -> None:
    show.table(_facts(loaded, described, found))
    typer.echo("")
    rows = [(_when(one.at, found.at), _what(one), one.rule, one.reason) for one in found.timeline]
    show.table(rows, head=("when", "action", "rule", "reason"))
    show.text(("\n" if rows else "") + found.end)
    show.text("\nAssumes:")
    for words in found.assumes:
        show.text(f"  {words}")
    print_message(f"Policy: {loaded.source} ({loaded.policy.preset}, mode {loaded.policy.mode}).")


def _facts(loaded: Loaded, described: WorkloadDescription, found: TrialView) -> list[tuple[str, str]]:
    subject, now = found.subject, found.at
    ran = f" for {in_words(now - subject.started)}" if isinstance(subject.started, datetime) else ""
    state = f"{subject.outcome} {in_words(described.ended_since)} ago" if subject.outcome else f"{subject.state}{ran}"
    idle = ", in use" if described.busy else f", idle for {in_words(described.idle_for)}" if described.idle_for else ""
    groups = f" (group {', '.join(found.groups)})" if found.groups else ""
    return [
        ("workload", subject.ref.path),
        ("class", f"{found.class_} ({_because(loaded, described, found)})"),
        ("owner", f"{described.owner or 'unknown'}{groups}"),
        ("state", f"{state}{idle}, {described.gpus} GPU{'' if described.gpus == 1 else 's'}"),
        ("now", f"{found.now.action}: {found.now.reason}"),
    ]


def _because(loaded: Loaded, described: WorkloadDescription, found: TrialView) -> str:
    """Why it has its class."""
    if described.class_ is not None:
        return "by --class"
    if found.match is not None:
        return f"by match[{found.match}], {loaded.origin(('match', found.match))}"
    listed = "; no entry of match applies" if loaded.policy.match else ""
    return f"recognized by {described.platform}{listed}"


def _what(one: UpcomingAction) -> str:
    """A second warning is shown as the second; what is kept from then on is reported."""
    if one.action.value == "keep":
        return "report"
    return f"{one.action} {one.stage}" if one.stage else str(one.action)


def _when(at: datetime, now: datetime) -> str:
    return f"in {in_words(at - now)}" if at > now else "now"
