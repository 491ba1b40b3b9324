"""Every page and its address."""

from __future__ import annotations

from gpukeeper.interfaces.web.api.routes import API_ROUTES
from gpukeeper.interfaces.web.app import Page
from gpukeeper.interfaces.web.pages import (
    acceptance,
    account,
    backtest,
    bulk,
    fleet,
    health,
    history,
    metrics,
    plan,
    policy,
    usage,
    workload,
)

ROUTES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", fleet.show),
    ("GET", "/fleet", fleet.rows),
    ("GET", "/workloads", workload.listed),
    ("POST", "/bulk", bulk.preview),
    ("POST", "/bulk/{token}", bulk.confirm),
    ("GET", "/bulk/{token}", bulk.show),
    ("GET", "/find", workload.find),
    ("GET", "/workload/{id}", workload.show),
    ("POST", "/workload/{id}/{verb}", workload.change),
    ("GET", "/plan", plan.show),
    ("GET", "/history", history.show),
    ("POST", "/restore", history.restore),
    ("GET", "/usage", usage.show),
    ("GET", "/usage.csv", usage.as_csv),
    ("GET", "/acceptance", acceptance.show),
    ("GET", "/acceptance/gpu/{serial}", acceptance.gpu),
    ("GET", "/policy", policy.show),
    ("GET", "/policy/try", policy.trial),
    ("GET", "/backtest", backtest.show),
    ("GET", "/health", health.show),
    ("GET", "/healthz", health.alive),
    ("GET", "/readyz", health.ready),
    ("GET", "/metrics", metrics.show),
    ("GET", "/login", account.how),
    ("GET", "/login/{token}", account.confirm),
    ("POST", "/login/{token}", account.redeem),
    ("POST", "/logout", account.logout),
    ("POST", "/theme", account.theme),
    *API_ROUTES,
)
