"""Every kind of container of a DS01 host: what DS01 does with it, and what is decided about it after the import.

Columns: what it is; after what time without use and at what runtime DS01 stops it, by the settings in ds01_host and by
its scripts; then the class, and when gpukeeper stops it. `never`: nothing stops it. `reported`: it is listed, and
nothing stops it. The same table is in the migration guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NEVER, REPORTED = "never", "reported"
ALL_GPUS = "all"


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    theirs: tuple[str, str]  # idle, runtime
    class_: str
    ours: tuple[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    image_labels: Mapping[str, str] = field(default_factory=dict)
    home_of: str = ""  # whose home it has mounted
    name: str = "train"
    published: bool = False
    gpu: bool = True
    earlier: bool = False  # on purpose, and listed by the import

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.what, *self.theirs, f"`{self.class_}`", *self.ours)


def wrapped(user: str, **more: str) -> dict[str, str]:
    """As DS01's wrapper labels every container. Its own commands add an interface."""
    return {"ds01.user": user, "ds01.managed": "true", **{f"ds01.{key}": value for key, value in more.items()}}


def made(user: str) -> dict[str, str]:
    return wrapped(user, interface="orchestration", container_type="orchestration")


def dev(user: str) -> dict[str, str]:
    return {"devcontainer.local_folder": f"/home/{user}/x", "devcontainer.metadata": "[]"}


COMPOSE = {"com.docker.compose.project": "lab"}
TABLE: tuple[Row, ...] = (
    Row(
        what="made by its commands, by a student",
        theirs=("30m", "1d"),
        class_="managed",
        ours=("34m", "1d"),
        labels=made("stu"),
    ),
    Row(
        what="the same, by a user in no group",
        theirs=("30m", "1d"),
        class_="managed",
        ours=("34m", "1d"),
        labels=made("new"),
    ),
    Row(what="the same, by a researcher", theirs=("1h", "2d"), class_="managed", ours=("1h", "2d"), labels=made("res")),
    Row(what="the same, by faculty", theirs=("2h", "3d"), class_="managed", ours=("2h", "3d"), labels=made("fac")),
    Row(
        what="the same, by an admin", theirs=("1h", "1d"), class_="managed", ours=("1h", "1d"), labels=made("labadmin")
    ),
    Row(
        what="the same, overridden without limits",
        theirs=(NEVER, NEVER),
        class_="managed",
        ours=(NEVER, NEVER),
        labels=made("free"),
    ),
    Row(
        what="the same, overridden with 60h, by a researcher",
        theirs=("30m", "2d12h"),
        class_="managed",
        ours=("34m", "2d12h"),
        labels=made("slow"),
    ),
    Row(
        what="the same, exempt from both",
        theirs=(NEVER, NEVER),
        class_="managed",
        ours=(NEVER, NEVER),
        labels=made("grant"),
    ),
    Row(
        what="the same, exempt from the runtime for good",
        theirs=("30m", NEVER),
        class_="managed",
        ours=("34m", NEVER),
        labels=made("always"),
    ),
    Row(
        what="the same, with an exemption that ended",
        theirs=("30m", "1d"),
        class_="managed",
        ours=("34m", "1d"),
        labels=made("past"),
    ),
    Row(
        what="the same, by a researcher, with the home of another user mounted",
        theirs=("1h", "2d"),
        class_="managed",
        ours=("2h", "3d"),
        labels=made("res"),
        home_of="fac",
    ),
    Row(
        what="an older one with `aime.mlc.USER`, by a researcher",
        theirs=("1h", "2d"),
        class_="managed",
        ours=("1h", "2d"),
        labels={"aime.mlc": "res", "aime.mlc.USER": "res"},
        name="train._.1002",
    ),
    Row(
        what="one whose owner only the name `train._.1002` shows, a researcher",
        theirs=("1h", "2d"),
        class_="managed",
        ours=("2h", "3d"),
        name="train._.1002",
    ),
    Row(
        what="a dev container, by a student",
        theirs=(NEVER, "7d"),
        class_="devcontainer",
        ours=(REPORTED, "7d"),
        labels={**wrapped("stu", container_type="devcontainer"), **dev("stu")},
        home_of="stu",
    ),
    Row(
        what="a dev container, by faculty",
        theirs=(NEVER, "7d"),
        class_="devcontainer",
        ours=(REPORTED, "7d"),
        labels={**wrapped("fac", container_type="devcontainer"), **dev("fac")},
        home_of="fac",
    ),
    Row(
        what="a dev container that VS Code started past the wrapper",
        theirs=(NEVER, "7d"),
        class_="devcontainer",
        ours=(REPORTED, "7d"),
        labels=dev("stu"),
        home_of="stu",
    ),
    Row(
        what="compose, by a student",
        theirs=("30m", "3d"),
        class_="compose",
        ours=("34m", "3d"),
        labels={**wrapped("stu", container_type="compose"), **COMPOSE},
    ),
    Row(
        what="compose past the wrapper, with a home mounted",
        theirs=("30m", "3d"),
        class_="compose",
        ours=("34m", "3d"),
        labels=COMPOSE,
        home_of="stu",
    ),
    Row(
        what="`docker run`, by a student",
        theirs=("30m", "2d"),
        class_="docker",
        ours=("34m", "2d"),
        labels=wrapped("stu", container_type="docker"),
    ),
    Row(
        what="`docker run`, exempt from both",
        theirs=(NEVER, NEVER),
        class_="docker",
        ours=(NEVER, NEVER),
        labels=wrapped("grant", container_type="docker"),
    ),
    Row(
        what="`docker run` past the wrapper, with a home mounted",
        theirs=("30m", "2d"),
        class_="docker",
        ours=("34m", "2d"),
        home_of="stu",
    ),
    Row(
        what="`docker run` known only by `ds01.user`",
        theirs=("30m", "2d"),
        class_="docker",
        ours=("34m", "2d"),
        labels={"ds01.user": "stu"},
    ),
    Row(
        what="`docker run -p`, by a student",
        theirs=("30m", "2d"),
        class_="serving",
        ours=(REPORTED, NEVER),
        labels=wrapped("stu", container_type="docker"),
        published=True,
    ),
    Row(
        what="a job of the API",
        theirs=("15m", "1d"),
        class_="api",
        ours=(REPORTED, "1d"),
        labels=wrapped("stu", interface="api", container_type="api"),
    ),
    Row(what="`docker run` without an owner", theirs=("30m", "2d"), class_="unknown", ours=(REPORTED, "7d")),
    Row(
        what="the same, of type `unknown`",
        theirs=("15m", "1d"),
        class_="unknown",
        ours=(REPORTED, "7d"),
        labels={"ds01.container_type": "unknown"},
    ),
    Row(
        what="a dev container without an owner",
        theirs=(NEVER, "7d"),
        class_="unknown",
        ours=(REPORTED, "7d"),
        labels={"devcontainer.local_folder": "c:\\x"},
    ),
    Row(
        what="by a user whom the machine does not know",
        theirs=("30m", "2d"),
        class_="unknown",
        ours=(REPORTED, "7d"),
        labels=wrapped("gone", container_type="docker"),
    ),
    Row(
        what="whose `ds01.user` came with the image",
        theirs=("30m", "2d"),
        class_="unknown",
        ours=(REPORTED, "7d"),
        labels={"ds01.user": "fac"},
        image_labels={"ds01.user": "fac"},
    ),
    Row(
        what="`ds01-dcgm-exporter`, with `ds01.monitoring`",
        theirs=(NEVER, NEVER),
        class_="infrastructure",
        ours=(NEVER, NEVER),
        labels={"ds01.monitoring": "true"},
        name="ds01-dcgm-exporter",
    ),
    Row(
        what="a user's with `ds01.monitoring`",
        theirs=(NEVER, NEVER),
        class_="docker",
        ours=(NEVER, NEVER),
        labels={**wrapped("stu", container_type="docker"), "ds01.monitoring": "true"},
    ),
    Row(
        what="a user's with `ds01.protected`",
        theirs=("30m", "2d"),
        class_="docker",
        ours=(NEVER, NEVER),
        labels={**wrapped("stu", container_type="docker"), "ds01.protected": "true"},
    ),
    Row(
        what="without a GPU",
        theirs=(NEVER, NEVER),
        class_="without-gpu",
        ours=(NEVER, NEVER),
        labels={**wrapped("stu", container_type="compose"), **COMPOSE},
        gpu=False,
    ),
    Row(
        what="past the wrapper, from an image with `devcontainer.metadata`, with a home mounted",
        theirs=(NEVER, "7d"),
        class_="docker",
        ours=("34m", "2d"),
        labels={"devcontainer.metadata": "[]"},
        image_labels={"devcontainer.metadata": "[]"},
        home_of="stu",
        earlier=True,
    ),
)
HEADER = ("container", "DS01: not used", "DS01: runtime", "class", "not used", "runtime")


def as_markdown() -> str:
    lines = [HEADER, ("---",) * len(HEADER), *(row.cells for row in TABLE)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def engine_parts(row: Row, started: str) -> dict[str, Any]:
    """The container in the engine's words."""
    bind = {"Type": "bind", "Source": f"/home/{row.home_of}/x", "Destination": "/x", "RW": True}
    return {
        "name": f"/{row.name}",
        "labels": {**row.image_labels, **row.labels},
        "mounts": [bind] if row.home_of else [],
        "state": {"StartedAt": started},
        "created": started,
        "host": {"PortBindings": {"80/tcp": [{"HostPort": "80"}]}} if row.published else {},
    }
