"""Every route of the API: the server and the OpenAPI document are made of this table."""

from __future__ import annotations

from gpukeeper.interfaces.web.api import changes, reads
from gpukeeper.interfaces.web.api.openapi import document
from gpukeeper.interfaces.web.api.table import PREFIX, ApiRoute, Call, NoQuery, Outcome, page_of
from gpukeeper.interfaces.web.api.values import (
    ActionReply,
    ConfirmBody,
    EmptyBody,
    ExplainDocument,
    GpuHistoryQuery,
    GpuList,
    GpuQuery,
    HoldBody,
    LedgerQuery,
    LineList,
    ListQuery,
    MachineList,
    OfMachine,
    PlanPage,
    PlanQuery,
    ReasonBody,
    ReportTime,
    RestoreBody,
    RunsQuery,
    SignalsQuery,
    TrialQuery,
    WorkloadList,
)
from gpukeeper.interfaces.web.app import Page
from gpukeeper.views.acceptance_history import GpuHistory, RunLines
from gpukeeper.views.health import HealthView
from gpukeeper.views.live import WorkloadLine
from gpukeeper.views.policy import PolicyView
from gpukeeper.views.timeline import Timeline
from gpukeeper.views.trial import PolicyTrial
from gpukeeper.views.usage_report import UsageReport

_DONE = {200: ActionReply}
_ASKED = {200: ActionReply, 202: ActionReply}

API: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/machines", "machines", "Machines and their places.", reads.machines, {200: MachineList}),
    ApiRoute("GET", "/gpus", "gpus", "GPUs with use, holder and next step.", reads.gpus, {200: GpuList}, GpuQuery),
    ApiRoute("GET", "/workloads", "workloads", "Workloads.", reads.workloads, {200: WorkloadList}, ListQuery),
    ApiRoute("GET", "/workloads/{id}", "workload", "One workload.", reads.workload, {200: WorkloadLine}),
    ApiRoute(
        "GET",
        "/workloads/{id}/explain",
        "explain",
        "Every rule's verdict and why.",
        reads.explain,
        {200: ExplainDocument},
    ),
    ApiRoute(
        *("GET", "/workloads/{id}/signals", "signals", "Signals over time: own work, or as an admin."),
        *(reads.signals, {200: Timeline}, SignalsQuery),
    ),
    ApiRoute("GET", "/plan", "plan", "What would be done now, and why.", reads.plan, {200: PlanPage}, PlanQuery),
    ApiRoute("GET", "/ledger", "ledger", "Lines of the ledger.", reads.ledger, {200: LineList}, LedgerQuery),
    ApiRoute("GET", "/report", "report", "Usage and savings.", reads.report, {200: UsageReport}, ReportTime),
    ApiRoute("GET", "/acceptance", "acceptance", "Acceptance runs.", reads.runs, {200: RunLines}, RunsQuery),
    ApiRoute(
        *("GET", "/acceptance/gpu", "acceptanceOfGpu", "A GPU's figures over its runs, with peers and floor."),
        *(reads.gpu_runs, {200: GpuHistory}, GpuHistoryQuery),
    ),
    ApiRoute("GET", "/policy", "policy", "The policy in effect.", reads.policy, {200: PolicyView}, OfMachine),
    ApiRoute(
        *("GET", "/policy/try", "policyTry", "What would happen to a hypothetical workload; needs a login."),
        *(reads.policy_trial, {200: PolicyTrial}, TrialQuery),
    ),
    ApiRoute("GET", "/health", "health", "Health of gpukeeper.", reads.health, {200: HealthView}, OfMachine),
    ApiRoute("POST", "/workloads/{id}/hold", "hold", "Hold it.", changes.hold, _DONE, NoQuery, HoldBody),
    ApiRoute("POST", "/workloads/{id}/release", "release", "End a hold.", changes.release, _DONE, NoQuery, EmptyBody),
    ApiRoute("POST", "/workloads/{id}/stop", "stop", "Stop it.", changes.stop, _ASKED, NoQuery, ConfirmBody),
    ApiRoute("POST", "/workloads/{id}/remove", "remove", "Remove it.", changes.remove, _ASKED, NoQuery, ConfirmBody),
    ApiRoute("POST", "/restore", "restore", "Restore what was stopped.", changes.restore, _DONE, NoQuery, RestoreBody),
    ApiRoute("POST", "/pause", "pause", "Pause all actions (admins).", changes.pause, _DONE, NoQuery, ReasonBody),
    ApiRoute("POST", "/resume", "resume", "End a pause (admins).", changes.resume, _DONE, NoQuery, OfMachine),
)


async def _openapi(call: Call) -> Outcome:
    return Outcome(_DOCUMENT)


_DOCUMENT = document(API)
_DESCRIPTION = ApiRoute("GET", "/openapi.json", "openapi", "This document.", _openapi, {})
API_ROUTES: tuple[tuple[str, str, Page], ...] = tuple(
    (one.method, f"{PREFIX}{one.path}", page_of(one)) for one in (*API, _DESCRIPTION)
)
