"""`gpukeeper node`: the GPUs of this machine: the condition of each after its last work, and which are quarantined;
with --on, the GPU nodes of a cluster with the marks that gpukeeper set: a plan unless --apply. And the register:
what was taken out again and again, by serial number.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from gpukeeper.acceptance.fleet.marks import (
    Change,
    MarkPlan,
    NodeMarks,
    NodeState,
    Quarantine,
    plan_quarantine,
    plan_return,
    state_of,
)
from gpukeeper.acceptance.launchers.marks import Marked
from gpukeeper.blocking import SystemClock
from gpukeeper.config.load import load_policy
from gpukeeper.config.machine import FLEET
from gpukeeper.config.units import read_span
from gpukeeper.devices import holders
from gpukeeper.devices.driver.client import inventory
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.gpus import occupied
from gpukeeper.engine.requests import GPU_UUID
from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.cli.main import Entry, group_of
from gpukeeper.interfaces.cli.marking import (
    MarkOptions,
    cause,
    document,
    exit_code,
    planned_or_applied,
    print_marks,
    read_register,
    refuse_engine,
)
from gpukeeper.interfaces.cli.submit import submit
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import confirmed, opened
from gpukeeper.ledger.files import name_or_uid
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.lifecycle.claims import MayUse
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import may_use_view
from gpukeeper.views.history import line_row, lines_view
from gpukeeper.views.nodes import (
    GpuCondition,
    NodeGpuView,
    NodeView,
    Register,
    RegisterEntry,
    RegisterEvent,
    entries_of,
    gpu_condition,
)
from gpukeeper.wiring import kubernetes

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session


def list_cluster(engine: str, context: str, policy: Path | None, *, json: bool) -> None:
    refuse_engine(engine)
    place, found = asyncio.run(kubernetes.read_nodes({"context": context}, load_policy(policy).policy.marks))
    now = SystemClock().now()
    nodes = tuple(state_of(one, now) for one in sorted(found, key=lambda one: one.node) if one.gpu)
    if json:
        shown.as_json("cluster-nodes", {"place": place, "nodes": nodes})
        return
    shown.table([_node_row(one) for one in nodes], head=("state", "node", "acceptance", "run", "reason"))
    over = [one.node for one in nodes if one.expired]
    if over:
        print_message(f"The time of {len(over)} quarantines is over: gpukeeper node return --expired --on {engine}")
    if not nodes:
        print_message("The cluster has no GPU nodes.")


def _node_row(one: NodeState) -> tuple[str, ...]:
    state = "quarantined" if one.quarantined else "out" if one.out else "in service"
    return (state, one.node, one.acceptance or "-", one.run or "-", one.quarantine or one.out or "-")


PATIENCE = timedelta(seconds=10)
HISTORY = 20  # lines
COMMANDS = {
    "quarantine": Entry(
        "gpukeeper.interfaces.cli.node:quarantine",
        "Take a GPU of this machine, or a node of a cluster, out of use.",
    ),
    "return": Entry(
        "gpukeeper.interfaces.cli.node:return_",
        "End the quarantine of a GPU, or of a node of a cluster.",
    ),
    "register": Entry(
        "gpukeeper.interfaces.cli.node:register",
        "List GPUs and machines that were taken out or failed.",
    ),
}
app = typer.Typer(
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    help="List, show, quarantine and return GPUs of this machine and nodes of a cluster.",
)
Gpu: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="GPU",
        help="UUID or a unique prefix, index on this machine, or gpu-0 as printed by observe.",
    ),
]


@app.command("list")
def list_(
    on: Annotated[str, typer.Option("--on", metavar="ENGINE", help="Nodes of a cluster instead: kubernetes.")] = "",
    context: Annotated[str, typer.Option("--context", metavar="NAME", help="With --on: kubeconfig context.")] = "",
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """List the GPUs with their last recorded condition. Shows why and since when they are quarantined."""
    if on:
        list_cluster(on, context, policy, json=json)
        return
    with opened(policy, write=False) as session:
        inventory, remembered = _inventory(), _remembered(session)
        held = _held(inventory)
        known = _known(inventory, remembered)
        view = NodeView(
            session.keeper.host,
            tuple(gpu_condition(uuid, index, remembered.get(uuid), held.get(uuid)) for uuid, index in known),
            inventory.why if isinstance(inventory, Unknown) else None,
        )
        if json:
            shown.as_json("node-list", view)
            return
        if view.unseen is not None:
            print_message(
                f"The GPUs of this machine could not be read ({view.unseen}). The list shows GPUs from the ledger."
            )
        shown.table([_row(gpu) for gpu in view.gpus], head=("condition", "gpu", "uuid", "since", "reason", "held by"))
        if not view.gpus:
            print_message("No GPUs found.")


@app.command()
def show(gpu: Gpu, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Show everything recorded about one GPU."""
    with opened(policy, write=False) as session:
        inventory, remembered = _inventory(), _remembered(session)
        uuid, index = _find(gpu, inventory, remembered)
        lines = asyncio.run(session.ledger.lines(LineFilter(last=HISTORY, workload=uuid)))
        condition = gpu_condition(uuid, index, remembered.get(uuid), _held(inventory).get(uuid))
        if json:
            shown.as_json("node-show", NodeGpuView(session.keeper.host, condition, lines_view(lines).lines))
            return
        facts = msgspec.structs.asdict(condition)
        shown.table([(name.replace("_", " "), str(value)) for name, value in facts.items() if value is not None])
        shown.table([shown.line_row(line_row(seq, line)) for seq, line in lines])


MAY_NOT, MAY_BE = 4, 5


@app.command("may-use")
def may_use(
    gpu: Gpu,
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="The user who is to get it.")],
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Whether this GPU may be given to that user now: not held, not kept for another owner, not in quarantine. For
    allocators. Reserves nothing.

    Exit code 0: yes, 4: no, 5: it could not be determined."""
    with opened(policy, write=False, quiet=True) as session:
        found = asyncio.run(observe_fleet(session.keeper, session.book))
        view = may_use_view(found, session.book, gpu, user, session.keeper.clock.now())
    if json:
        shown.as_json("node-may-use", view)
    else:
        typer.echo(f"{view.answer}: {view.name} for {view.user}: {view.reason}")
    if view.answer is not MayUse.YES:
        raise typer.Exit(MAY_NOT if view.answer is MayUse.NO else MAY_BE)


def change_gpu(verb: str, gpu: str, reason: str, policy: Path | None, json: bool) -> None:
    with opened(policy, write=False) as session:
        uuid, _ = _find(gpu, _inventory(), _remembered(session))
    submit(verb, policy=policy, json=json, workload=uuid, reason=reason)


def _inventory() -> tuple[GpuFacts, ...] | Unknown:
    if os.environ.get(FLEET):
        return Unknown("a fleet from files has no GPUs", by_design=True)
    return inventory(PATIENCE)


def _remembered(session: Session) -> dict[str, GpuMemory]:
    return asyncio.run(session.ledger.gpus(session.keeper.host))


def _known(inventory: tuple[GpuFacts, ...] | Unknown, remembered: dict[str, GpuMemory]) -> list[tuple[str, int | None]]:
    """Every uuid with its index: what the driver names, then what is only in the ledger and quarantined."""
    found: dict[str, int | None] = {}
    for gpu in () if isinstance(inventory, Unknown) else inventory:
        if isinstance(gpu.uuid, str):
            found[gpu.uuid] = gpu.index
        if not isinstance(gpu.slices, Unknown):
            found |= {part.uuid: None for part in gpu.slices}
    for uuid, one in remembered.items():
        if isinstance(inventory, Unknown) or one.quarantined is not None:
            found.setdefault(uuid, None)
    return list(found.items())


def _find(
    words: str, inventory: tuple[GpuFacts, ...] | Unknown, remembered: dict[str, GpuMemory]
) -> tuple[str, int | None]:
    known = _known(inventory, remembered)
    meant = _observed_names(inventory).get(words.rpartition("/")[2].lower().replace(" ", "-"))
    fitting = [one for one in known if words in (one[0], str(one[1])) or meant == one[0]] or [
        one for one in known if one[0].lower().startswith(words.lower())
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and isinstance(inventory, Unknown) and GPU_UUID.fullmatch(words):
        return words, None  # quarantine must work while the driver does not answer
    if fitting:
        raise UsageError(f'"{words}" matches {len(fitting)} GPUs: {", ".join(uuid for uuid, _ in fitting)}')
    raise UsageError(f'this machine has no GPU "{words}". To list them: gpukeeper node list')


def _observed_names(inventory: tuple[GpuFacts, ...] | Unknown) -> dict[str, str]:
    """The uuid by the name that observe prints: gpu-0, gpu-0-slice-1."""
    found: dict[str, str] = {}
    for gpu in () if isinstance(inventory, Unknown) else inventory:
        if isinstance(gpu.uuid, str):
            found[f"gpu-{gpu.index}"] = gpu.uuid
        for part in () if isinstance(gpu.slices, Unknown) else gpu.slices:
            found[f"gpu-{gpu.index}-slice-{part.index}"] = part.uuid
    return found


def _held(inventory: tuple[GpuFacts, ...] | Unknown) -> dict[str, str]:
    """By uuid: the processes that have it open now and are no services; or that this is unknown."""
    if isinstance(inventory, Unknown) or not inventory:
        return {}
    try:
        found = occupied(inventory, holders.scan(), name_or_uid)
    except OSError as error:
        return {str(one.uuid): f"unknown: {error.strerror}" for one in inventory}
    return {
        uuid: f"unknown: {by.why}" if isinstance(by, Unknown) else by for uuid, by in found.items() if by is not None
    }


def _row(gpu: GpuCondition) -> tuple[str, ...]:
    index, held_by = "-" if gpu.index is None else str(gpu.index), gpu.held_by or "-"
    if gpu.quarantined is not None:
        why = f"{gpu.quarantine_reason} ({gpu.quarantined_by})"
        return ("quarantined", index, gpu.uuid, _when(gpu.quarantined), why, held_by)
    because = gpu.reason or "no work has ended on it yet"
    return (gpu.condition or "not checked", index, gpu.uuid, _when(gpu.checked), because, held_by)


def _when(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M}Z" if at is not None else "-"


CHANGES_HEAD = ("change", "node", "reason")
Reason: TypeAlias = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to all users.")]
_GPU = "A GPU of this machine: UUID or a unique prefix, index, or gpu-0 as printed by observe. With --on: a node."


@o.with_options
def quarantine(
    name: Annotated[str, typer.Argument(metavar="GPU|NODE", help=_GPU)],
    options: MarkOptions,
    reason: Reason = "",
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="With --on: until when, for `return --expired`.")
    ] = None,
) -> None:
    """Take a GPU of this machine, or a node of a cluster, out of use. Does not stop work that runs on it.

    A GPU: admins only, at once. A node (--on): a plan unless --apply. Exit code 3: not done, 12: breaker is open."""
    if not options.on:
        _refuse_cluster_options(options, {"--for": for_ is not None})
        change_gpu("quarantine", name, reason, options.policy, options.json)
        return
    refuse_engine(options.on)
    settings, now = options.settings(), SystemClock().now()
    length = _length(for_)
    until = now + length if length is not None else None
    wanted = Quarantine(by=getpass.getuser(), at=now.replace(microsecond=0), reason=reason, until=until)

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan_quarantine(name, wanted, nodes, settings, now)

    why = msgspec.structs.replace(cause(), reason=reason, until=until)
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("node-quarantine", document(found, options))
    else:
        print_marks(found, options, _quarantine_planned, _written, CHANGES_HEAD)
    raise typer.Exit(exit_code(found))


@o.with_options
def return_(
    options: MarkOptions,
    name: Annotated[str, typer.Argument(metavar="GPU|NODE", help=_GPU)] = "",
    reason: Reason = "",
    expired: Annotated[
        bool, typer.Option("--expired", help="With --on: all nodes whose quarantine is over (--for).")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --on: also a node whose last acceptance failed. Asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask for confirmation.")] = False,
) -> None:
    """End the quarantine of a GPU, or of a node of a cluster. A GPU's current state then counts as clean.

    A GPU: admins only, at once. A node (--on): a plan unless --apply; exit code 3: some nodes were kept."""
    if not options.on:
        _refuse_cluster_options(options, {"--expired": expired, "--force": force, "--yes": yes})
        change_gpu("return", name, reason, options.policy, options.json)
        return
    refuse_engine(options.on)
    if expired == bool(name):
        raise UsageError("Name one node, or use --expired. Nothing was changed.")
    settings, now = options.settings(), SystemClock().now()

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan_return(None if expired else [name], nodes, settings, now, force=force)

    if force and options.apply and not yes:
        _confirm(name or "all nodes whose quarantine is over", json=options.json)
    why = msgspec.structs.replace(cause(), reason=reason)
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("node-return", document(found, options))
    else:
        print_marks(found, options, _return_planned, _written, CHANGES_HEAD)
    raise typer.Exit(exit_code(found))


def _refuse_cluster_options(options: MarkOptions, more: dict[str, bool]) -> None:
    given = {
        "--apply": options.apply,
        "--share": options.share is not None,
        "--most": options.most is not None,
        "--context": bool(options.context),
        **more,
    }
    flags = [flag for flag, value in given.items() if value]
    if flags:
        raise UsageError(f"{', '.join(flags)}: only with --on ENGINE, for nodes of a cluster. Nothing was changed.")


def _length(words: str | None) -> timedelta | None:
    if words is None:
        return None
    try:
        length = read_span(words)
    except ValueError as problem:
        raise UsageError(f"--for: {problem} Nothing was changed.") from None
    if length <= timedelta():
        raise UsageError(f"--for {words} is too short. Use for example --for 7d. Nothing was changed.")
    return length


def _confirm(what: str, *, json: bool) -> None:
    if json or not sys.stdin.isatty():
        raise UsageError(
            "--force needs a confirmation, and stdin is not a terminal. Nothing was changed. For scripts: --yes"
        )
    if not confirmed(f"Put {what} back into service although the last acceptance failed?"):
        raise typer.Exit(1)


def _quarantine_planned(one: Change) -> tuple[str, ...]:
    return ("quarantine" if one.takes_out else "update", one.node, one.condition.message)


def _return_planned(one: Change) -> tuple[str, ...]:
    return ("return", one.node, f"removes the taint {' and '.join(one.taints)}")


def _written(one: Marked) -> tuple[str, ...]:
    word = "quarantined" if one.quarantined else "tainted" if one.tainted else "in service"
    return (word, one.node, one.problem or one.deferred)


PARTLY = 3
REGISTER_HEAD = ("kind", "name", "model", "node", "taken out", "returned", "failed", "last")


def register(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Serial number, UUID of a GPU or a machine, or node: each event.")
    ] = "",
    report_dir: o.ReportDir = None,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """List GPUs and machines that were taken out or failed. By serial number, from the ledger of this machine.

    Taken out most often first. A machine is the same under another node name. Exit code 3: an archive of the ledger
    or a report could not be read."""
    found = read_register(load_policy(policy).policy.marks, report_dir)
    if name:
        found = Register(entries_of(found, name), found.unread)
        if not found.entries and not found.unread:
            raise UsageError(f'the register has nothing about "{name}". To list it: gpukeeper node register')
    if json:
        shown.as_json("node-register", found)
    else:
        _print_register(found, name)
    if found.unread:
        raise typer.Exit(PARTLY)


def _print_register(found: Register, name: str) -> None:
    shown.table([_entry_row(one) for one in found.entries], head=REGISTER_HEAD)
    if name:
        events = sorted({event for one in found.entries for event in one.events})
        shown.table([_event_row(one) for one in events], head=("at", "event", "node", "run", "by", "reason"))
    for one in found.entries:
        if one.warning:
            print_message(f"{one.warning}.")
    for problem in found.unread:
        print_message(f"The register is not complete: {problem}")
    if not found.entries and not found.unread:
        print_message("The ledger has no failed acceptance runs and no nodes or GPUs that were taken out.")


def _entry_row(one: RegisterEntry) -> tuple[str, ...]:
    failed = f"{one.failed} ({one.not_marked} not marked)" if one.not_marked else str(one.failed)
    counts = (str(one.taken_out), str(one.returned), failed)
    return (one.kind, one.name, one.model or "-", one.nodes[0], *counts, f"{one.events[-1].at:%Y-%m-%d}")


def _event_row(one: RegisterEvent) -> tuple[str, ...]:
    return (f"{one.at:%Y-%m-%d %H:%M}Z", one.what, one.node, one.run or "-", one.by, one.reason)
