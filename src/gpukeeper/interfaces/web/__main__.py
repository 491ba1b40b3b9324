"""The web process of `serve --web`: python -m gpukeeper.interfaces.web LINK LISTENER REVOCATIONS.

The arguments are inherited descriptors.
Everything is loaded before rights are given up, so that a package that only root may read does not matter afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

from gpukeeper.interfaces.link import Account, Revocations
from gpukeeper.interfaces.web.application import make_app
from gpukeeper.interfaces.web.connections import HttpServer
from gpukeeper.interfaces.web.source import connect

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
    _be_ended_first()
    server = HttpServer(app, source.tls, proxy.uid if (proxy := source.settings.site.proxy) else None)
    give_up_rights(source.account)
    source.on_tls = server.renew
    await server.serve(listener, source.closed())


def give_up_rights(account: Account | None) -> None:
    """As root: another user, without groups. In any case: no more rights by programs that are started."""
    if os.geteuid() == 0:
        account = account or Account(NO_USER, NO_USER)
        os.setgroups([])
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
        _set(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user has cleared it
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    _set(_PR_SET_DUMPABLE, 0)


def _be_ended_first() -> None:
    """Where memory is short: this process, not the daemon, is what clients can make grow."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _set(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    sys.exit(main())
