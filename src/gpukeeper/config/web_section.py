"""The section `web` of a policy file."""

from __future__ import annotations

from gpukeeper.config import fields as f
from gpukeeper.config import web_fields as w
from gpukeeper.config.section import Section, about
from gpukeeper.model import policy as model

_WEB = model.Web()


class WebProxy(Section):
    header: w.HeaderName = about(
        _WEB.proxy.header, "Header with the name of the logged-in person: X-Forwarded-User. Needs `from`."
    )
    from_: list[w.Network] = about(
        list(_WEB.proxy.from_),
        "Addresses and networks of the proxy: [10.0.0.2]. From other addresses the header is ignored.",
        alias="from",
    )
    user: w.AccountOrNone = about(
        _WEB.proxy.user,
        "User that the proxy runs as, if it runs on this machine: www-data. From processes of other users on this "
        "machine the header is ignored.",
    )


class WebTls(Section):
    certificate: f.FilePath = about(_WEB.tls.certificate, "PEM file with the certificate and its chain.")
    key: f.SecretFile = about(_WEB.tls.key, "PEM file with the private key, without a passphrase, mode 0600.")


class Web(Section):
    url: f.WebAddress = about(
        _WEB.url, "URL of the dashboard as browsers reach it, for links and checks of requests: https://gpu.example."
    )
    user: w.Account = about(_WEB.user, "User that the web process runs as, if the daemon runs as root.")
    proxy: WebProxy = about(WebProxy(), "Reverse proxy that logs people in.")
    tls: WebTls = about(WebTls(), "Certificate for HTTPS. Renewed files are loaded within a minute.")
    sessions: f.Interval = about(_WEB.sessions, "How long a login in a browser lasts; at most 31d.")
    read_on_loopback: bool = about(
        _WEB.read_on_loopback, "On loopback, users of this machine may read without a login."
    )
    plain_http: bool = about(
        _WEB.plain_http,
        "Serve other machines without TLS and without a proxy. Cookies and tokens can then be read on the network.",
    )
