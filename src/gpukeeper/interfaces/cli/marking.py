"""What commands that change marks of nodes share: where, how many may be out, the plan, and what was done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from gpukeeper.acceptance.fleet.node_marks import Change, MarkPlan
from gpukeeper.acceptance.launchers.marks import AGAIN, Applied, Marked, Replan, Work
from gpukeeper.acceptance.launchers.recording import Cause
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.cli.node_records import recording, repeated
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.stopping import until_stopped
from gpukeeper.model.errors import PolicyError, UsageError
from gpukeeper.model.policy import Amount, MarkSettings
from gpukeeper.wiring import node_marks
from gpukeeper.wiring.clock import SystemClock

ENGINES = ("kubernetes",)
PARTLY, BREAKER, INTERRUPTED = 3, 12, 130
STOPPING = "Interrupted: the node in progress is completed, no other is begun. Press Ctrl-C again to exit at once."
On = Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"The engine: {', '.join(ENGINES)}.")]
Context = Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]


@dataclass(frozen=True, kw_only=True)
class MarkOptions:
    """Where, and how many nodes may be out."""

    on: On = ""
    apply: Annotated[bool, typer.Option("--apply", help="Write the marks. Default: print the plan.")] = False
    share: Annotated[
        float | None,
        typer.Option("--share", min=0.0, max=1.0, metavar="X", help="Share of GPU nodes that may be out; at least 1."),
    ] = None
    most: Annotated[
        int | None, typer.Option("--most", min=0, metavar="N", help="Number of GPU nodes that may be out.")
    ] = None
    context: Context = ""
    policy: o.PolicyFile = None
    json: o.Json = False

    @property
    def where(self) -> dict[str, str]:
        return {"context": self.context}

    def settings(self) -> MarkSettings:
        """Of the policy, unless an option says something else."""
        loaded = load_policy(self.policy)
        if self.apply and loaded.untrusted:
            raise PolicyError(
                [f"{one}. A policy that other users can change is not applied." for one in loaded.untrusted]
            )
        settings = loaded.policy.marks
        if self.share is None and self.most is None:
            return settings
        return msgspec.structs.replace(settings, max_out=Amount(count=self.most, share=self.share))


@dataclass(frozen=True)
class MarkResult:
    """`warnings`: what was taken out again and again. `problems`: what was done and could not be recorded."""

    found: Applied
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def refuse_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise UsageError(f'--on "{engine}" is not an engine. Name one: {", ".join(ENGINES)}')


def planned_or_applied(options: MarkOptions, replan: Replan, settings: MarkSettings, why: Cause) -> MarkResult:
    """After Ctrl-C: what was done until then."""
    if options.apply:
        found, problems = _applied_and_recorded(options, replan, settings, why)
        return MarkResult(found, _repeated(found.plan, settings), problems)
    plan = asyncio.run(node_marks.plan_marks(options.where, replan, settings))
    return MarkResult(Applied(plan=plan), _repeated(plan, settings))


def _repeated(plan: MarkPlan, settings: MarkSettings) -> tuple[str, ...]:
    return repeated({*(one.node for one in plan.changes), *(one.node for one in plan.kept)}, settings)


def _applied_and_recorded(
    options: MarkOptions, replan: Replan, settings: MarkSettings, why: Cause
) -> tuple[Applied, tuple[str, ...]]:
    with recording(why) as record:
        work = node_marks.work_on(options.where, replan, settings, SystemClock().now())
        record.place, work.announce = work.api.place, record.begin
        try:
            found = asyncio.run(_applied(work))
        except KeyboardInterrupt:
            names = ", ".join(sorted(work.written)) or "no node"
            print_message(f"Interrupted while marks were written. Changed: {names}. {AGAIN}.")
            raise typer.Exit(INTERRUPTED) from None
        return found, record.end(found.nodes)


async def _applied(work: Work) -> Applied:
    with until_stopped(work.stop, STOPPING):
        return await node_marks.applied(work)


def document(result: MarkResult, options: MarkOptions) -> dict[str, object]:
    return {
        "plan": result.found.plan,
        "applied": options.apply,
        "nodes": result.found.nodes,
        "warnings": result.warnings,
        "problems": result.problems,
    }


def print_marks(
    result: MarkResult,
    options: MarkOptions,
    planned: Callable[[Change], tuple[str, ...]],
    written: Callable[[Marked], tuple[str, ...]],
    head: tuple[str, ...],
) -> None:
    """The plan, or what was done."""
    found, plan = result.found, result.found.plan
    rows = [written(one) for one in found.nodes] if options.apply else [planned(one) for one in plan.changes]
    blank = ("-",) * (len(head) - 3)
    shown.table([*rows, *(("kept", one.node, *blank, one.why) for one in plan.kept)], head=head)
    for words in result.warnings:
        print_message(f"{words.rstrip('.')}.")
    for words in result.problems:
        print_message(words)
    _print_limit(plan, applied=options.apply)


def _print_limit(plan: MarkPlan, *, applied: bool) -> None:
    print_message(f"{plan.out} of {plan.nodes} GPU nodes were out before; at most {plan.allowed} may be.")
    if plan.breaker:
        print_message(f"{plan.breaker}. Find the cause first.")
    if not applied:
        print_message("Nothing was changed. To write the marks: add --apply")


def exit_code(result: MarkResult) -> int:
    found = result.found
    if found.interrupted:
        return INTERRUPTED
    if found.plan.breaker:
        return BREAKER
    partly = any(one.deferred or one.problem for one in found.nodes) or any(one.deferred for one in found.plan.changes)
    return PARTLY if partly or found.plan.kept or result.problems else 0
