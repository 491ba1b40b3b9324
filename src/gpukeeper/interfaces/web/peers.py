"""Which address and which user of this machine a request comes from, and whether a reverse proxy that logs people
in sent it.

On one machine every user can connect from its addresses, so that there the kernel is asked whose process it is
(sock_diag, else the table of all connections).
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - bind and connect load it, perhaps when this process may read no files any more
import errno
import functools
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import UNKNOWN_UID, TrustedProxy

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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


Ends = tuple[str, int]  # address and port
_ESTABLISHED = 1
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEAD = struct.Struct("=IHHII")  # length, type, flags, number, port
_STATE_AT, _UID_AT = _HEAD.size + 1, _HEAD.size + 64  # struct inet_diag_msg
_ANY_COOKIE = b"\xff" * 8


def socket_owner(peer: Ends, own: Ends) -> int | None:
    """The uid of the process on this machine that has the other end of a connection. None: it is not known, as of a
    connection that is not open any more (the kernel then reports no owner, or root), or of a user whom our user
    namespace does not know."""
    uid = _asked(peer, own) if is_quick() else _looked_up(peer, own)
    return None if uid == _hidden() else uid


@functools.cache
def is_quick() -> bool:
    """Whether the kernel answers about a single connection: tried with one of our own."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 1.0) as trial,
        ):
            return _asked(trial.getsockname(), listener.getsockname()) is not None
    except OSError:
        return False


@functools.cache
def _hidden() -> int | None:
    """What stands for every user that a user namespace does not know; None: it knows all."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
            return None
    except FileNotFoundError:
        return None  # a kernel without user namespaces
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _asked(peer: Ends, own: Ends) -> int | None:
    addresses = [address_of(host) for host, _ in (peer, own)]
    if None in addresses:
        return None
    family = socket.AF_INET if all(one and one.version == 4 for one in addresses) else socket.AF_INET6
    packed = b"".join(one.packed.ljust(16, b"\0") for one in addresses if one is not None)
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 2**32 - 1)
    asked += struct.pack("!HH", peer[1], own[1]) + packed + bytes(4) + _ANY_COOKIE
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.sendto(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked, (0, 0))
            answer, sender = kernel.recvfrom(4096)
    except OSError:
        return None
    if sender[0] != 0 or len(answer) < _UID_AT + 4 or _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return uid if answer[_STATE_AT] == _ESTABLISHED else None


def _looked_up(peer: Ends, own: Ends) -> int | None:
    ends = [(address_of(host), port) for host, port in (peer, own)]
    for table in _TABLES:
        words = " ".join(_kernel_words(address, port, wide=table.name == "tcp6") for address, port in ends)
        try:
            _, found, rest = table.read_text().partition(f" {words} ")
        except FileNotFoundError:
            continue  # no IPv6
        if found:
            state, _, _, _, uid, _ = rest.split(maxsplit=5)
            return int(uid) if int(state, 16) == _ESTABLISHED else None
    return None


def _kernel_words(address: Address | None, port: int, *, wide: bool) -> str:
    """0100007F:1F90: an address as words of the machine's byte order."""
    if address is None or (address.version == 6 and not wide):
        return "-"
    packed = address.packed if address.version == 6 or not wide else b"\0" * 10 + b"\xff\xff" + address.packed
    parts = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{part:08X}' for part in parts)}:{port:04X}"


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
