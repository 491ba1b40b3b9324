"""The policy in effect: the sentence, every value with its origin, what the last change changed; and a trial of it.

Of a fleet: which policy is in effect where."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site, ask_for, machine_of
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading
from gpukeeper.model.subject import OUTCOMES
from gpukeeper.views.own_state import PolicySetting, PolicyView
from gpukeeper.views.trial import PolicyTrial, WorkloadWords

STATES = ("running", "ended", "created")
PLATFORMS = ("docker", "kubernetes")


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    if site.source.settings.fleet:  # the copy holds which policies are in effect, not what they say
        return site.page(request, visitor, "policies.html", views=readable(site, visitor))
    machine = machine_of(site, request)
    found = await ask_for(site, visitor, machine, PolicyView, Request(verb="policy"))
    wanted = request.query_params.get("q", "").strip()[:200]
    rows = [one for one in found.settings if wanted.lower() in f"{one.setting} {one.value} {one.origin}".lower()]
    return site.page(request, visitor, "policy.html", machine=machine, policy=found, rows=rows, wanted=wanted)


async def trial(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """The form, and below it what would happen; a description that contradicts itself is answered in the form."""
    machine = machine_of(site, request)
    policy = await ask_for(site, visitor, machine, PolicyView, Request(verb="policy"))
    given = _words(request)
    found, problem = None, ""
    if visitor.logged_in and request.query_params.get("try"):
        answer = await site.ask(visitor, machine, Request(verb="try", described=msgspec.to_builtins(given)))
        found = reading.decode(answer.body, type=PolicyTrial) if answer.done else None
        problem = answer.words
    return site.page(
        request,
        visitor,
        "policy_try.html",
        400 if problem and found is None else 200,
        machine=machine,
        policy=policy,
        given=given,
        labels=", ".join(given.label),
        found=found,
        problem=problem,
        platforms=PLATFORMS,
        states=STATES,
        outcomes=OUTCOMES,
        classes=_names(policy.settings, "classes"),
        groups=_names(policy.settings, "groups"),
        environments=_names(policy.settings, "environments"),
    )


def _words(request: HttpRequest) -> WorkloadWords:
    query = request.query_params
    given: dict[str, object] = {
        name: value.strip()[:200]
        for name in WorkloadWords.__struct_encode_fields__
        if name not in ("label", "gpus", "busy", "demand") and (value := query.get(name, "").strip())
    }
    gpus = query.get("gpus", "").strip() or "1"
    if not (gpus.isascii() and gpus.isdecimal() and len(gpus) < 6):
        raise HTTPException(400, f'"{gpus[:40]}" is not a number of GPUs.')
    labels = [one.strip() for one in query.get("label", "")[:2000].split(",")]
    flags = {name: bool(query.get(name)) for name in ("busy", "demand")}
    return msgspec.convert(
        {**given, **flags, "gpus": int(gpus), "label": [one for one in labels if one]}, WorkloadWords
    )


def _names(settings: Iterable[PolicySetting], section: str) -> list[str]:
    """Those in use: `classes.managed.idle` is a setting of the class managed."""
    pattern = re.compile(rf"{section}\.([^.\[]+)")
    return sorted({found[1] for one in settings if (found := pattern.match(one.setting))})
