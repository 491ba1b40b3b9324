"""The flags that mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gpukeeper.interfaces.terminal import completion

PolicyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--policy", help="Policy file. Default: the site's, else the built-in one.", metavar="FILE"),
]
OnPlatform: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--platform",
        help="Only this platform or place: docker, docker/node-3.",
        autocompletion=completion.platforms,
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, with its schema's name.")]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Only results, no talk.")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Also what is kept, and why.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do not ask. Acts only when the policy's mode is enforce.")]
Namespace: TypeAlias = Annotated[str | None, typer.Option("--namespace", help="Only this namespace; patterns allowed.")]
Label: TypeAlias = Annotated[str | None, typer.Option("--label", help="Only with this label: key or key=value.")]
Kind: TypeAlias = Annotated[str | None, typer.Option("--kind", help="Only this kind: container, trainjob, tree, …")]
Owner: TypeAlias = Annotated[
    str | None, typer.Option("--owner", help="Only this person's; nobody: what has no known owner.")
]
Class: TypeAlias = Annotated[
    str | None, typer.Option("--class", help="Only this class, as the policy assigns it; patterns allowed.")
]
OutcomeIs: TypeAlias = Annotated[
    str | None,
    typer.Option("--outcome", help="Only succeeded, failed or stopped ones.", autocompletion=completion.outcomes),
]
OlderThan: TypeAlias = Annotated[
    str | None, typer.Option("--older-than", help="Only what ended (or started) longer ago: 30m, 1h, 2d.")
]
Name: TypeAlias = Annotated[str | None, typer.Option("--name", help="Only this name; patterns allowed.")]
Image: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--image", help="Only work made from this image: name (any tag), name:tag, or the beginning of its id."
    ),
]
Textfile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--textfile", help="Also write metrics, for a node_exporter: a file ending in .prom.", metavar="FILE"),
]
Workload: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="platform/place/[namespace/kind/]name; any unique ending will do.",
        autocompletion=completion.workloads,
    ),
]
