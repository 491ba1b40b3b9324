"""Which address a request comes from, and whether a reverse proxy that logs people in sent it.

On one machine every user can connect from its addresses, so that there the kernel is asked whose process it is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import UNKNOWN_UID, TrustedProxy
from gpukeeper.interfaces.web.addresses import Address, address_of, is_here, plain
from gpukeeper.interfaces.web.socket_owner import socket_owner

FORWARDED = ("x-forwarded-for", "forwarded", "x-forwarded-host", "x-real-ip", "via")
CONNECTION = "connection"  # key in the state of a request: what is remembered about its connection
MOST_HOPS = 20
_UID = "uid"
Owner = Callable[[tuple[str, int], tuple[str, int]], int | None]
Here = Callable[[str], bool]


class Peers:
    def __init__(self, proxy: TrustedProxy | None, owner: Owner = socket_owner, here: Here = is_here) -> None:
        self.proxy, self._owner, self._here = proxy, owner, here
        self._networks = [ipaddress.ip_network(one, strict=False) for one in (proxy.addresses if proxy else ())]

    def address(self, connection: HTTPConnection) -> str:
        """Of the other end: the proxy's, or the client's. Empty: not known, as over a unix socket."""
        return plain(connection.client.host) if connection.client is not None else ""

    def is_proxy(self, connection: HTTPConnection) -> bool:
        client = connection.client
        if self.proxy is None or client is None or not self._is_named(client.host):
            return False
        uid = self.uid(connection)
        return uid is None or (self.proxy.uid is not None and uid == self.proxy.uid)

    def uid(self, connection: HTTPConnection) -> int | None:
        """Of the process on this machine that has the other end, as in Credentials. It is asked for once: later the
        kernel may know it no more, or have given the port to another user."""
        client = connection.client
        remembered: dict[str, Any] = (connection.scope.get("state") or {}).get(CONNECTION, {})
        if _UID not in remembered:
            here = client is None or self._here(client.host)
            host, port = connection.scope.get("server") or ("", 0)
            found = self._owner((client.host, client.port), (host, port or 0)) if here and client else None
            remembered[_UID] = UNKNOWN_UID if here and found is None else found
        return remembered[_UID]  # type: ignore[no-any-return]

    def client(self, connection: HTTPConnection) -> str:
        """Behind the proxy: the last address that no trusted proxy has. Others cannot choose theirs."""
        address = self.address(connection)
        words = ",".join(connection.headers.getlist("x-forwarded-for"))
        for hop in reversed(words.split(",")[-MOST_HOPS:]):
            found = address_of(_without_port(hop.strip()))
            if found is None:
                return address
            address = str(found)
            if not self._is_named(address):
                return address
        return address

    def is_forwarded(self, connection: HTTPConnection) -> bool:
        """By any proxy: then it comes from elsewhere, though it arrived over loopback."""
        return any(name in connection.headers for name in FORWARDED)

    def _is_named(self, host: str) -> bool:
        found = address_of(host)
        if found is None:
            return False
        return any(found in one or _mapped(found) in one for one in self._networks)


def _mapped(address: Address) -> Address:
    return ipaddress.ip_address(f"::ffff:{address}") if address.version == 4 else address


def _without_port(words: str) -> str:
    """1.2.3.4:5678, [fd00::2]:5678"""
    if words.startswith("["):
        return words[1:].partition("]")[0]
    return words.partition(":")[0] if words.count(":") == 1 else words
