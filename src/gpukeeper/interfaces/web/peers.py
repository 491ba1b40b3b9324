"""Which address a request comes from, and whether a reverse proxy that logs people in sent it.

On one machine every user can connect from its addresses, so that there the kernel is asked whose process it is.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import TrustedProxy

FORWARDED = ("x-forwarded-for", "forwarded", "x-forwarded-host", "x-real-ip", "via")
CONNECTION = "connection"  # key in the state of a request: what is remembered about its connection
MOST_HOPS = 20
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"
_IS_PROXY = "is proxy"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Owner = Callable[[tuple[str, int], tuple[str, int]], int | None]
Here = Callable[[str], bool]


def is_here(host: str) -> bool:
    """An address of this machine: we could use it ourselves."""
    found = address_of(host)
    if found is None or found.is_loopback:
        return True
    with socket.socket(socket.AF_INET if found.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(found), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def socket_owner(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """The uid of the process on this machine that has the other end of a connection. None: the connection is not open
    any more; the kernel then reports no owner, or root."""
    ends = [(address_of(host), port) for host, port in (peer, own)]
    for table in _TABLES:
        words = " ".join(_kernel_words(address, port, wide=table.name == "tcp6") for address, port in ends)
        try:
            _, found, rest = table.read_text().partition(f" {words} ")
        except FileNotFoundError:
            continue  # no IPv6
        if found:
            state, _, _, _, uid, _ = rest.split(maxsplit=5)
            return int(uid) if state == _ESTABLISHED else None
    return None


def _kernel_words(address: Address | None, port: int, *, wide: bool) -> str:
    """0100007F:1F90: an address as words of the machine's byte order."""
    if address is None or (address.version == 6 and not wide):
        return "-"
    packed = address.packed if address.version == 6 or not wide else b"\0" * 10 + b"\xff\xff" + address.packed
    parts = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{part:08X}' for part in parts)}:{port:04X}"


class Peers:
    def __init__(self, proxy: TrustedProxy | None, owner: Owner = socket_owner, here: Here = is_here) -> None:
        self.proxy, self._owner, self._here = proxy, owner, here
        self._networks = [ipaddress.ip_network(one, strict=False) for one in (proxy.addresses if proxy else ())]

    def address(self, connection: HTTPConnection) -> str:
        """Of the other end: the proxy's, or the client's. Empty: not known, as over a unix socket."""
        return plain(connection.client.host) if connection.client is not None else ""

    def is_proxy(self, connection: HTTPConnection) -> bool:
        """Of one connection it stays the same."""
        client = connection.client
        if self.proxy is None or client is None or not self._is_named(client.host):
            return False
        remembered = (connection.scope.get("state") or {}).get(CONNECTION, {})
        if _IS_PROXY not in remembered:
            host, port = connection.scope.get("server") or ("", 0)
            remembered[_IS_PROXY] = not self._here(client.host) or (
                self.proxy.uid is not None
                and self._owner((client.host, client.port), (host, port or 0)) == self.proxy.uid
            )
        return bool(remembered[_IS_PROXY])

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


def plain(host: str) -> str:
    """::ffff:10.0.0.2 is 10.0.0.2. What is no address stays."""
    found = address_of(host)
    return host if found is None else str(found)


def address_of(host: str) -> Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _mapped(address: Address) -> Address:
    return ipaddress.ip_address(f"::ffff:{address}") if address.version == 4 else address


def _without_port(words: str) -> str:
    """1.2.3.4:5678, [fd00::2]:5678"""
    if words.startswith("["):
        return words[1:].partition("]")[0]
    return words.partition(":")[0] if words.count(":") == 1 else words
