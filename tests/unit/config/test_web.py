"""Settings of the dashboard: read strictly, and refused if they would let the wrong people in."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.policy import Web, WebProxy, WebTls


def web(text: str) -> Web:
    return load_text(f"scope: {{docker: {{}}}}\nweb: {text}\n").policy.web


def test_by_default_there_is_no_proxy_and_no_certificate() -> None:
    assert web("{}") == Web()
    assert Web().user == "nobody"
    assert not Web().plain_http


def test_everything_can_be_set() -> None:
    found = web(
        "{url: https://gpu.example, user: www-gpu, sessions: 8h, read_on_loopback: false, plain_http: true, "
        "proxy: {header: X-Forwarded-User, from: [10.0.0.2, 10.1.0.0/24, fd00::2]}, "
        "tls: {certificate: /etc/tls/a.crt, key: /etc/tls/a.key}}"
    )
    assert found == Web(
        url="https://gpu.example",
        user="www-gpu",
        sessions=timedelta(hours=8),
        read_on_loopback=False,
        plain_http=True,
        proxy=WebProxy(header="X-Forwarded-User", from_=("10.0.0.2", "10.1.0.0/24", "fd00::2")),
        tls=WebTls(certificate="/etc/tls/a.crt", key="/etc/tls/a.key"),
    )


def test_a_proxy_on_this_machine_names_its_user() -> None:
    found = web("{proxy: {header: X-User, from: [127.0.0.1], user: www-data}}")
    assert found.proxy.user == "www-data"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{proxy: {header: X-User}}", "from is missing, so any client could send the header"),
        ("{proxy: {from: [10.0.0.2]}}", "header is missing"),
        ("{proxy: {user: www-data}}", "header is missing"),
        ("{proxy: {header: X-User, from: [127.0.0.1]}}", "every user of this machine can connect from loopback"),
        ("{proxy: {header: X-User, from: ['::1']}}", "every user of this machine"),
        ("{proxy: {header: X-User, from: ['::ffff:127.0.0.1']}}", "every user of this machine"),
        ("{proxy: {header: X-User, from: [96.0.0.0/3]}}", "every user of this machine"),
        ("{proxy: {header: X-User, from: [0.0.0.0/0]}}", "includes every address"),
        ("{proxy: {header: X-User, from: ['::/0']}}", "includes every address"),
        ("{proxy: {header: X-User, from: [10.0.0.2/24]}}", "has host bits set"),
        ("{proxy: {header: X-User, from: [proxy.example]}}", "is not an address or a network"),
        ("{proxy: {header: X-User, from: 10.0.0.2}}", "is not a list"),
        ("{proxy: {header: X_User, from: [10.0.0.2]}}", "is not the name of a header"),
        ('{proxy: {header: "X-User:", from: [10.0.0.2]}}', "is not the name of a header"),
        ("{proxy: {header: Cookie, from: [10.0.0.2]}}", "has another meaning"),
        ("{proxy: {header: x-forwarded-for, from: [10.0.0.2]}}", "has another meaning"),
        ("{proxy: {header: X-User, form: [10.0.0.2]}}", 'Did you mean "from"?'),
        ("{tls: {certificate: /etc/a.crt}}", "key is missing"),
        ("{tls: {key: /etc/a.key}}", "certificate is missing"),
        ("{tls: {certificate: a.crt, key: /etc/a.key}}", "is not an absolute path"),
        ("{url: http://gpu.example, tls: {certificate: /a.crt, key: /a.key}}", "begins with https://"),
        ("{user: root}", "must not run as root"),
        ("{user: 'a b'}", "is not the name of a user"),
        ("{sessions: 0}", "is too short"),
        ("{sessions: 400d}", "Write at most 31d"),
        ("{plain_http: perhaps}", "plain_http"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(PolicyError) as problem:
        web(text)
    assert words in str(problem.value)
