"""Parameters, bodies and replies of the API that are not values of `views` themselves."""

from __future__ import annotations

from typing import Annotated, Any
from zoneinfo import available_timezones

import msgspec

from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.ledger.lines import TYPES
from gpukeeper.model.reading import TEXT_MAX, Moment
from gpukeeper.model.subject import Outcome
from gpukeeper.views.explain import ExplainView
from gpukeeper.views.live import GpuState, GpuTile, WorkloadLine
from gpukeeper.views.plan import PlanView
from gpukeeper.views.trial import STATES, WorkloadWords

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000, description="The most entries of one reply.")]
Word = Annotated[str, msgspec.Meta(max_length=200)]
Words = Annotated[str, msgspec.Meta(max_length=1000)]
LineNumber = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
LineType = Annotated[Word, msgspec.Meta(extra_json_schema={"enum": sorted(TYPES)})]
ZoneName = Annotated[Word, msgspec.Meta(extra_json_schema={"enum": ["", *sorted(available_timezones())]})]
_SPAN = "([0-9]{1,4}(us|ms|s|m|h|d|w))+"
SpanWords = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^({_SPAN}|0|)$", "maxLength": TEXT_MAX})]
MachineName = Annotated[Word, msgspec.Meta(description="The machine; may be left out if there is only one.")]


class OfMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: MachineName = ""


class ListQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply."""

    place: Word = ""
    platform: Word = ""
    owner: Word = ""
    class_: Word = msgspec.field(default="", name="class")
    q: Word = ""
    limit: Limit = 500
    after: Word = ""


class GpuQuery(ListQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: GpuState | None = None


class LedgerQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply; older lines follow."""

    type: tuple[LineType, ...] = ()
    owner: Word = ""
    workload: Word = ""
    errors: bool = False
    q: Word = ""
    limit: Limit = 100
    after: LineNumber | None = None


class RunsQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 100
    after: LineNumber | None = None


class GpuHistoryQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`serial`: its serial number, or uuid where it has none."""

    serial: Word = ""


class ReportTime(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default: the last 30 days."""

    since: Moment | None = None
    until: Moment | None = None
    zone: ZoneName = ""
    owner: Word = ""


class TrialQuery(WorkloadWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the options of `gpukeeper policy try`; a duration like 2h."""

    machine: MachineName = ""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    state: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["", *STATES]})] = ""
    outcome: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["", *Outcome]})] = ""
    label: tuple[Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[^=]"})], ...] = ()
    running_for: SpanWords = ""
    idle_for: SpanWords = ""
    ended_since: SpanWords = ""
    ttl: SpanWords = ""
    hold: SpanWords = ""


class SignalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hours: Annotated[float, msgspec.Meta(gt=0, le=168)] = 24.0


class HoldBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seconds` None: as long as the policy allows."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=366 * 86400)] | None = None
    reason: Words = ""


class ReasonBody(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Words = ""


class ConfirmBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without a token the reply describes what would be done, with a token for the second request."""

    token: Word = ""


class EmptyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """{}"""


class RestoreBody(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`workload`: its path or uid, as in the ledger."""

    workload: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class MachineHead(msgspec.Struct, frozen=True, kw_only=True):
    """A machine without its GPUs and workloads."""

    machine: str
    at: Moment
    version: str
    policy: PolicyHead
    paused: str | None
    places: tuple[PlaceState, ...]
    gpus: int
    workloads: int
    not_seen_since: Moment | None = None  # what is shown of it is old; None: it is current


class MachineList(msgspec.Struct, frozen=True):
    machines: tuple[MachineHead, ...]


class GpuList(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: None: these were the last."""

    gpus: tuple[GpuTile, ...]
    next: str | None = None


class PlanQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply."""

    limit: Limit = 500
    after: Word = ""


class PlanPage(PlanView, frozen=True, kw_only=True):
    """Of each place the decisions and steps of this page; the rest is of the whole place. `next`: None: these were the
    last."""

    next: str | None = None


class WorkloadList(msgspec.Struct, frozen=True, kw_only=True):
    workloads: tuple[WorkloadLine, ...]
    next: str | None = None


class LineList(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first, each with its number `seq`. `next`: for older lines."""

    lines: tuple[dict[str, Any], ...]
    next: int | None = None


class ExplainDocument(ExplainView, frozen=True, kw_only=True):
    """As the schema describes it. `diagnosis` is one of two untagged values, of which a schema knows no union."""

    diagnosis: Any


class ActionReply(msgspec.Struct, frozen=True, kw_only=True):
    """With a token nothing was done yet: the same request with that token does it."""

    done: bool
    words: str
    token: str = ""
