"""The options that mean the same everywhere, and those that plan, apply and observe share as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
import typer

from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal.session import narrowed
from gpukeeper.lifecycle.settings import Narrow

PolicyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        help="Policy file. Default: your own file, else /etc/gpukeeper/policy.yaml, else the built-in policy.",
        metavar="FILE",
    ),
]
OnPlatform: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="PLATFORM",
        help="Only this platform or place: docker, docker/node-3.",
        autocompletion=completion.platforms,
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, with the name of its schema.")
]
JsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print each line as one JSON object: the lines of the journal.")
]
ReportDir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Suppress messages.")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Also show what is kept, and why.")]
Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", help="Do not ask for confirmation. Acts only if the policy's mode is enforce.")
]
Namespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Only this namespace; patterns allowed.")
]
Label: TypeAlias = Annotated[
    str | None, typer.Option("--label", metavar="KEY[=VALUE]", help="Only objects with this label.")
]
Kind: TypeAlias = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help="Only this kind: container, trainjob, tree, …")
]
Owner: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--owner", metavar="USER", help="Only workloads of this owner; `nobody` selects those without a known owner."
    ),
]
Class: TypeAlias = Annotated[
    str | None,
    typer.Option("--class", metavar="NAME", help="Only this class, as assigned by the policy; patterns allowed."),
]
OutcomeIs: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--outcome",
        metavar="OUTCOME",
        help="Only ended work with this outcome: succeeded, failed or stopped.",
        autocompletion=completion.outcomes,
    ),
]
OlderThan: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="DURATION",
        help="Only what ended (or, if running, started) longer ago than this: 30m, 2d.",
    ),
]
Name: TypeAlias = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Only this name; patterns allowed.")
]
Image: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="IMAGE", help="Only work with this image: name (any tag), name:tag, or a prefix of its id."
    ),
]
Textfile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--textfile",
        help="Also write metrics to this .prom file, for the textfile collector of node_exporter.",
        metavar="FILE",
    ),
]
Workload: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="platform/place/[namespace/kind/]name, or any unique ending of it.",
        autocompletion=completion.workloads,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which policy applies, and which part of what it covers is meant. Nothing given: all of it."""

    policy: PolicyFile = None
    platform: OnPlatform = None
    namespace: Namespace = None
    label: Label = None
    kind: Kind = None
    owner: Owner = None
    outcome: OutcomeIs = None
    older_than: OlderThan = None
    name: Name = None
    image: Image = None

    @property
    def narrow(self) -> Narrow:
        """Without the platform: a session is opened for it alone."""
        other = ("policy", "platform", "older_than")
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in other}
        return narrowed(Narrow(**given), self.older_than)


@dataclass(frozen=True, kw_only=True)
class SelectionByClass(Selection):
    class_: Class = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Typer gets each option of the command's parameters that are dataclasses or structs; the command gets these."""
    hints = get_type_hints(command, include_extras=True)
    kinds = {name: kind for name, kind in hints.items() if isinstance(kind, type) and _defaults(kind)}

    @wraps(command)
    def run(**given: Any) -> None:
        values = {name: kind(**{one: given.pop(one) for one in _defaults(kind)}) for name, kind in kinds.items()}
        command(**values, **given)

    parameters = [
        parameter
        for name, one in inspect.signature(command).parameters.items()
        for parameter in (_options_of(kinds[name]) if name in kinds else [_parameter(name, hints[name], one.default)])
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options_of(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [_parameter(name, hints[name], default) for name, default in _defaults(kind).items()]


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Of each option, in order; an empty one has to be given. Nothing: it is no value of options."""
    if is_dataclass(kind):
        return {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in fields(kind)}
    if not issubclass(kind, msgspec.Struct):
        return {}
    found = msgspec.structs.fields(kind)
    return {one.name: one.default_factory() if one.default is msgspec.NODEFAULT else one.default for one in found}


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
