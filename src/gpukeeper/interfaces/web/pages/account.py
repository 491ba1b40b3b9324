"""Logging in by a link that `gpukeeper login` printed, and out."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import THEMES, Site, form_of, session_cookie
from gpukeeper.interfaces.web.security import THEME, Visitor, is_secure

NO_LONGER = (
    "The login of this browser is not valid here: it has expired, was revoked, or was made from another machine or by "
    "another user of this one. Log in again."
)


async def how(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    problem = NO_LONGER if site.cookie(request) in request.cookies and not visitor.logged_in else ""
    return site.page(request, visitor, "login.html", token="", problem=problem)


async def confirm(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    """A button, because programs that scan mail open links, and a link works once."""
    return site.page(request, visitor, "login.html", token=request.path_params["token"], problem="")


async def redeem(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    answer = await site.source.ask(visitor.credentials, "", Request(verb="redeem", token=request.path_params["token"]))
    if not answer.done:
        return site.page(request, visitor, "login.html", 403, token="", problem=answer.words)
    response = RedirectResponse("/", 303)
    session_cookie(site, request, response, answer.token)
    return response


async def logout(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    await site.ask(visitor, "", Request(verb="logout"))
    site.forget(visitor.credentials)
    response = RedirectResponse("/login", 303)
    secure = is_secure(request, site.source.settings.site, site.peers)  # a browser ignores it otherwise
    response.delete_cookie(site.cookie(request), path="/", secure=secure, httponly=True, samesite="strict")
    return response


async def theme(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    form = await form_of(request)
    wanted, back = form.get("theme", ""), form.get("back", "/")
    if wanted not in ("", *THEMES) or not back.startswith("/") or back.startswith(("//", "/\\")):
        raise HTTPException(400, f"The theme is one of: {', '.join(THEMES)}.")
    response = RedirectResponse(back, 303)
    if wanted:
        response.set_cookie(THEME, wanted, max_age=365 * 86400, path="/", httponly=True, samesite="strict")
    else:
        response.delete_cookie(THEME, path="/")
    return response
