"""The web process of `serve --web`: python -m gpukeeper.interfaces.web LINK LISTENER REVOCATIONS.

The arguments are inherited descriptors.
Everything is loaded before rights are given up, so that a package that only root may read does not matter afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pwd
import signal
import socket
import sys

import uvicorn

from gpukeeper.interfaces.revocations import Revocations
from gpukeeper.interfaces.web.application import make_app
from gpukeeper.interfaces.web.linked import connect

USER = "nobody"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
NO_USER = 65534


def main() -> int:
    link, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    parent = os.getppid()
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(link, listener, Revocations(int(sys.argv[3]))))
    return 0


async def _serve(link: socket.socket, listener: socket.socket, revocations: Revocations) -> None:
    source = await connect(link, revocations)
    app = make_app(source)
    give_up_rights()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=True,
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32 * 1024,
        backlog=512,
        ws="none",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait([serving, asyncio.create_task(source.closed())], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving


def give_up_rights() -> None:
    """As root: another user, without groups. In any case: no more rights by programs that are started."""
    if os.geteuid() == 0:
        try:
            found = pwd.getpwnam(USER)
            uid, gid = found.pw_uid, found.pw_gid
        except KeyError:
            uid = gid = NO_USER
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        _set(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user has cleared it
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    _set(_PR_SET_DUMPABLE, 0)


def _set(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    sys.exit(main())
