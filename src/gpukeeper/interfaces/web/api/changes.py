"""Requests that change something: the daemon decides about each as it does for its socket."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.exceptions import HTTPException

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.api.reads import machine_of, named
from gpukeeper.interfaces.web.api.table import Call, Outcome
from gpukeeper.interfaces.web.api.values import ActionReply


async def hold(call: Call) -> Outcome:
    return await _of_workload(call, Request(verb="hold", seconds=call.body.seconds, reason=call.body.reason))


async def release(call: Call) -> Outcome:
    return await _of_workload(call, Request(verb="release"))


async def stop(call: Call) -> Outcome:
    return await _of_workload(call, Request(verb="stop", confirm=True, token=call.body.token))


async def remove(call: Call) -> Outcome:
    return await _of_workload(call, Request(verb="remove", confirm=True, token=call.body.token))


async def restore(call: Call) -> Outcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="restore", workload=call.body.workload))


async def pause(call: Call) -> Outcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="pause", reason=call.body.reason))


async def resume(call: Call) -> Outcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="resume"))


async def _of_workload(call: Call, request: Request) -> Outcome:
    view, line = named(call)
    return await _sent(call, view.machine, replace(request, workload=line.uid))


async def _sent(call: Call, machine: str, request: Request) -> Outcome:
    answer = await call.site.ask(call.visitor, machine, request)
    if answer.token:
        return Outcome(ActionReply(done=False, words=answer.words, token=answer.token), 202)
    if not answer.done:
        raise HTTPException(409, answer.words)
    return Outcome(ActionReply(done=True, words=answer.words))
