"""`gpukeeper policy import`: a policy from the settings of another tool, and what could not be translated."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.config.importing.ds01 import EXEMPTIONS, OVERRIDES, Companions, import_limits
from gpukeeper.config.importing.janitor import JanitorOptions, import_rules
from gpukeeper.config.importing.result import Imported
from gpukeeper.config.load import load_text
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import KeeperError, UsageError

PARTLY = 3
LARGEST = 1024 * 1024  # bytes


class SourceTool(StrEnum):
    DS01 = "ds01"
    KUBE_JANITOR = "kube-janitor"


def _names(of: str) -> str:
    return f"kube-janitor: its flag --{of}, names with commas. Default: as in kube-janitor."


def import_(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the other tool.")],
    tool: Annotated[
        SourceTool,
        typer.Option(
            "--from",
            help="The other tool. kube-janitor: rules file. ds01: resource-limits.yaml, with the files beside it.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the policy to this file. It must not exist.")
    ] = None,
    include_namespaces: Annotated[
        str | None, typer.Option("--include-namespaces", metavar="NAMES", help=_names("include-namespaces"))
    ] = None,
    exclude_namespaces: Annotated[
        str | None, typer.Option("--exclude-namespaces", metavar="NAMES", help=_names("exclude-namespaces"))
    ] = None,
    include_resources: Annotated[
        str | None, typer.Option("--include-resources", metavar="NAMES", help=_names("include-resources"))
    ] = None,
    exclude_resources: Annotated[
        str | None, typer.Option("--exclude-resources", metavar="NAMES", help=_names("exclude-resources"))
    ] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running",
            help="kube-janitor: also stop running work after the TTL of its rule; annotations do not change that.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Translate the settings of another tool into a policy. Its mode is plan. Never covers more than the original; what
    could not be translated is listed on stderr."""
    given = {
        "include_namespaces": include_namespaces,
        "exclude_namespaces": exclude_namespaces,
        "include_resources": include_resources,
        "exclude_resources": exclude_resources,
    }
    flags = {name: _list(name, value) for name, value in given.items() if value is not None}
    if tool is SourceTool.DS01:
        if flags or running:
            raise UsageError("The options of kube-janitor are not for --from ds01. Nothing was written.")
        found = import_limits(_read(file), str(file), _companions(file.parent))
    else:
        found = import_rules(_read(file), str(file), JanitorOptions(**flags, running=running))
    load_text(found.policy, f"the policy from {file}")  # it would be a bug if this failed
    if output is not None:
        _write(output, found.policy)
    if json:
        _print_json(tool, output, found)
    elif output is None:
        typer.echo(found.policy, nl=False)
    if not json:
        _tell(output, found)
    if found.not_translated:
        raise typer.Exit(PARTLY)


def _companions(directory: Path) -> Companions:
    """What is there and cannot be read is an error: those who are exempt must stay exempt."""
    groups = directory / "groups"
    members = [groups / name for name in sorted(_names_in(groups)) if name.endswith(".members")]
    there = {name: _read(directory / name) for name in (OVERRIDES, EXEMPTIONS) if name in _names_in(directory)}
    return Companions(
        members={path.stem: _read(path) for path in members},
        overrides=there.get(OVERRIDES),
        exemptions=there.get(EXEMPTIONS),
    )


def _names_in(directory: Path) -> list[str]:
    try:
        return [one.name for one in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{directory} could not be read: {error.strerror}. Nothing was written.") from error


def _print_json(tool: SourceTool, output: Path | None, found: Imported) -> None:
    show.as_json(
        "policy-import",
        {
            "from": tool.value,
            "source": found.source,
            "output": None if output is None else str(output),
            "policy": found.policy,
            "not_translated": found.not_translated,
        },
    )


def _tell(output: Path | None, found: Imported) -> None:
    if output is not None:
        print_message(f"{output} is written, in mode plan. Next: gpukeeper plan --policy {output}")
    for one in found.not_translated:
        print_message("not translated: " + "\n".join(one.lines()))


def _list(name: str, value: str) -> tuple[str, ...]:
    names = tuple(one.strip() for one in value.split(",") if one.strip())
    if not names and name.startswith("include"):
        raise UsageError(f"--{name.replace('_', '-')} is empty. Nothing was written. Write names with commas, or all.")
    return names


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UsageError(f"{file} is larger than {LARGEST // 1024} KiB. Nothing was written.")
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text. Nothing was written. Save it as UTF-8.") from None
    except OSError as error:
        raise UsageError(f"{file} could not be read: {error.strerror}. Nothing was written.") from error


def _write(output: Path, text: str) -> None:
    """Readable by others as any policy, writable by its owner only: others who can change it make it untrusted."""
    try:
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(number, "w", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists. Nothing was written. Name a file that does not exist.") from None
    except OSError as error:
        raise KeeperError(f"{output} could not be written: {error.strerror or error}.") from error
