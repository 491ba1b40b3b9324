"""`--compress`: the options with which plan and apply try a policy on named workloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.lifecycle.compressed import CompressedBook
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import UsageError

FULL_PATH = 2  # slashes: platform/place/name
PATTERN = frozenset("*?[")


@dataclass(frozen=True, kw_only=True)
class ShortTimes:
    """A policy with short times, on named workloads alone."""

    compress: Annotated[
        int | None,
        typer.Option(
            "--compress",
            min=2,
            max=3600,
            metavar="N",
            help="Try the policy with times divided by N, on the workloads named with --workload alone.",
        ),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", metavar="PATH", help="With --compress: a full path as `plan` prints it. Repeatable."
        ),
    ] = None

    @property
    def asked(self) -> bool:
        return self.compress is not None

    def check(self) -> None:
        """Before anything is read."""
        if self.compress is not None and not self.workload:
            raise UsageError(
                "--compress needs the workloads that it may act on: --workload PATH, as `gpukeeper plan --verbose` "
                "prints it. Nothing was done."
            )
        if self.compress is None and self.workload:
            raise UsageError("--workload needs --compress. To select by name: --name. Nothing was done.")
        for path in self.workload or ():
            if path.count("/") < FULL_PATH or set(path) & PATTERN:
                raise UsageError(
                    f'--workload "{path}" is not a full path such as docker/node-3/eval; patterns are not allowed. '
                    "Nothing was done."
                )

    def book(self, book: Rulebook) -> Rulebook:
        return book if self.compress is None else CompressedBook(book.policy, self.compress, self.workload or ())

    def narrow(self, narrow: Narrow) -> Narrow:
        return (
            narrow if self.compress is None else msgspec.structs.replace(narrow, paths=frozenset(self.workload or ()))
        )

    def name_missing(self, found: Iterable[str]) -> None:
        for path in sorted({*(self.workload or ())} - set(found)):
            print_message(f"{path} was not found.")
