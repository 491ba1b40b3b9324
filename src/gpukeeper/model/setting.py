"""The kinds of value that settings of a policy have. `config.fields` reads and writes each of them.

A setting is a field of a struct with a text beside its type: `idle: Annotated[Limit, "What it means."]`. A field
without one is not in the file.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import msgspec

from gpukeeper.model.unknown import Unknown


class Kind(msgspec.Struct, frozen=True):
    """The name under which `config.fields` knows it."""

    name: str


class InFile(msgspec.Struct, frozen=True):
    """Where a setting is in a file, if not under the name of its field and in the order of the struct."""

    name: str = ""
    after: str = ""  # the setting before it


Span = Annotated[timedelta, Kind("span")]
Interval = Annotated[timedelta, Kind("interval")]
Limit = Annotated[timedelta | None, Kind("limit")]
Retained = Annotated[timedelta | None, Kind("retained")]
AsClass = Annotated[timedelta | float | None, Kind("as class")]
Until = Annotated[datetime | Unknown | None, Kind("until")]
Cron = Annotated[str | None, Kind("cron")]
Quiet = Annotated[str | None, Kind("quiet")]

Size = Annotated[int, Kind("size")]
Percent = Annotated[float, Kind("percent")]
Share = Annotated[float, Kind("share")]
Count = Annotated[int, Kind("count")]
CountOrZero = Annotated[int, Kind("count or zero")]
Rate = Annotated[float, Kind("rate")]
Price = Annotated[float, Kind("price")]
Currency = Annotated[str, Kind("currency")]

Folder = Annotated[str, Kind("folder")]
Root = Annotated[str, Kind("root")]
NamePattern = Annotated[str, Kind("name pattern")]
FileOrNone = Annotated[str | None, Kind("file or none")]

Address = Annotated[str | None, Kind("address")]
WebAddress = Annotated[str | None, Kind("web address")]
DatabaseAddress = Annotated[str | None, Kind("database address")]
MachineName = Annotated[str | None, Kind("machine name")]
OwnerAddress = Annotated[str, Kind("owner address")]
AddressTemplate = Annotated[str | None, Kind("address template")]
Account = Annotated[str, Kind("account")]
AccountOrNone = Annotated[str | None, Kind("account or none")]
HeaderName = Annotated[str | None, Kind("header name")]
Network = Annotated[str, Kind("network")]
SignalName = Annotated[str, Kind("signal")]
EvidenceName = Annotated[str, Kind("evidence")]
