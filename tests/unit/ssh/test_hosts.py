"""A list of hosts, as people write it."""

from __future__ import annotations

import pytest

from gpukeeper.clients.ssh import Host, host, read_hosts, selected_hosts
from gpukeeper.model.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu1", Host("gpu1", "gpu1")),
        ("ann@gpu1", Host("gpu1", "gpu1", "ann")),
        ("ann@gpu1.lab.example:2222", Host("gpu1.lab.example:2222", "gpu1.lab.example", "ann", 2222)),
        ("10.0.0.7:22", Host("10.0.0.7:22", "10.0.0.7", "", 22)),
        ("[fe80::1%eth0]:2200", Host("[fe80::1%eth0]:2200", "fe80::1%eth0", "", 2200)),
    ],
)
def test_a_host_is_read(text: str, expected: Host) -> None:
    assert host(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=touch x",
        "a b",
        "a;b",
        "$(x)",
        "`x`",
        "gpu1:0",
        "gpu1:70000",
        "@gpu1",
        "-l@gpu1",
        "a/b",
        "..",
        "",
    ],
)
def test_an_option_or_a_command_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        host(text)


def test_a_list_has_comments_and_reports_all_its_problems_at_once() -> None:
    assert read_hosts(["# rack 1", "", "gpu1  # new", " ann@gpu2"], "f") == (Host("gpu1", "gpu1"), host("ann@gpu2"))
    with pytest.raises(UsageError) as raised:
        read_hosts(["gpu1", "-x", "gpu1", "a b"], "hosts.txt")
    for words in ('hosts.txt:2: "-x" is not a host', "hosts.txt:3: gpu1 is in the list twice", "hosts.txt:4:"):
        assert words in str(raised.value)


def test_names_select_from_the_list_or_are_hosts_themselves() -> None:
    known = read_hosts(["ann@gpu1", "gpu2", "gpu3"], "f")
    assert [one.node for one in selected_hosts(known, ("gpu3", "ann@gpu1", "gpu3"))] == ["gpu3", "gpu1"]
    assert selected_hosts(known, ()) == known
    assert selected_hosts((), ("bob@gpu9",)) == (host("bob@gpu9"),)
    with pytest.raises(UsageError, match=r"not in the list of hosts: gpu4\. Did you mean gpu"):
        selected_hosts(known, ("gpu4",))
