"""Settings of the dashboard that contradict each other, or would let the wrong people in."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_network

from gpukeeper.config.problems import Problem
from gpukeeper.config.units import span_in_words
from gpukeeper.model.policy import Web

LONGEST_SESSION = timedelta(days=31)


def check_web(web: Web) -> Iterator[Problem]:
    yield from _proxy(web)
    yield from _tls(web)
    if web.user == "root":
        yield Problem((("web", "user"),), "the web process must not run as root. Write it like nobody.")
    if web.sessions > LONGEST_SESSION:
        yield Problem(
            (("web", "sessions"),),
            f"a session of {span_in_words(web.sessions)} is too long. Write at most {span_in_words(LONGEST_SESSION)};"
            " for programs, use a token: gpukeeper login --token NAME.",
        )


def _proxy(web: Web) -> Iterator[Problem]:
    header, allowed, user = web.proxy.header, web.proxy.from_, web.proxy.user
    if header is not None and not allowed:
        yield Problem(
            (("web", "proxy"),),
            "from is missing, so any client could send the header and act as any person."
            " Write the addresses of the proxy, like from: [10.0.0.2].",
        )
    if header is None and (allowed or user is not None):
        yield Problem((("web", "proxy"),), "header is missing. Write it like header: X-Forwarded-User.")
    if user is None and any(_is_loopback(one) for one in allowed):
        yield Problem(
            (("web", "proxy", "from"),),
            "every user of this machine can connect from loopback, and could send the header."
            " Write the user that the proxy runs as, like user: www-data.",
        )


def _is_loopback(network: str) -> bool:
    """Or includes it. IPv4 addresses may be written as IPv6 (::ffff:127.0.0.1)."""
    found = ip_network(network)
    loopback = (ip_network("127.0.0.0/8"), ip_network("::1/128"), ip_network("::ffff:127.0.0.0/104"))
    return any(found.version == one.version and found.overlaps(one) for one in loopback)


def _tls(web: Web) -> Iterator[Problem]:
    certificate, key = web.tls.certificate, web.tls.key
    if (certificate is None) != (key is None):
        missing, example = (
            ("key", "/etc/gpukeeper/tls.key") if key is None else ("certificate", "/etc/gpukeeper/tls.crt")
        )
        yield Problem((("web", "tls"),), f"{missing} is missing. Write it like {missing}: {example}.")
    if certificate is not None and web.url is not None and web.url.startswith("http:"):
        yield Problem((("web", "url"), ("web", "tls")), "with TLS the URL begins with https://.")
