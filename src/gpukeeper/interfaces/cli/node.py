"""`gpukeeper node`: the GPUs of this machine: the condition of each after its last work, and which are quarantined."""

from __future__ import annotations

import asyncio
import os
import pwd
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from gpukeeper.config.environment import FLEET
from gpukeeper.devices import holders, occupancy
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.inventory import inventory
from gpukeeper.engine.requests import GPU_UUID
from gpukeeper.interfaces.cli.lazy import Entry, group_of
from gpukeeper.interfaces.cli.node_cluster import list_nodes
from gpukeeper.interfaces.cli.submit import submit
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.model.condition import GpuMemory
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.history import line_row, lines_view
from gpukeeper.views.node import GpuCondition, NodeGpuView, NodeView, gpu_condition

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session


PATIENCE = timedelta(seconds=10)
HISTORY = 20  # lines
COMMANDS = {
    "quarantine": Entry(
        "gpukeeper.interfaces.cli.node_quarantine:quarantine",
        "Take a GPU of this machine, or a node of a cluster, out of use.",
    ),
    "return": Entry(
        "gpukeeper.interfaces.cli.node_quarantine:return_",
        "End the quarantine of a GPU, or of a node of a cluster.",
    ),
    "register": Entry(
        "gpukeeper.interfaces.cli.node_register:register",
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
        list_nodes(on, context, policy, json=json)
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
        lines = asyncio.run(session.ledger.lines(last=HISTORY, workload=uuid))
        condition = gpu_condition(uuid, index, remembered.get(uuid), _held(inventory).get(uuid))
        if json:
            shown.as_json("node-show", NodeGpuView(session.keeper.host, condition, lines_view(lines).lines))
            return
        facts = msgspec.structs.asdict(condition)
        shown.table([(name.replace("_", " "), str(value)) for name, value in facts.items() if value is not None])
        shown.table([shown.line_row(line_row(seq, line)) for seq, line in lines])


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
        found = occupancy.occupied(inventory, holders.scan(), _user)
    except OSError as error:
        return {str(one.uuid): f"unknown: {error.strerror}" for one in inventory}
    return {
        uuid: f"unknown: {by.why}" if isinstance(by, Unknown) else by for uuid, by in found.items() if by is not None
    }


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _row(gpu: GpuCondition) -> tuple[str, ...]:
    index, held_by = "-" if gpu.index is None else str(gpu.index), gpu.held_by or "-"
    if gpu.quarantined is not None:
        why = f"{gpu.quarantine_reason} ({gpu.quarantined_by})"
        return ("quarantined", index, gpu.uuid, _when(gpu.quarantined), why, held_by)
    because = gpu.reason or "no work has ended on it yet"
    return (gpu.condition or "not checked", index, gpu.uuid, _when(gpu.checked), because, held_by)


def _when(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M}Z" if at is not None else "-"
