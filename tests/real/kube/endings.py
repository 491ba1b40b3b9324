"""Bare pods that ended, without waiting for a node: nobody schedules them, and their end is written by hand."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.real.kube import objects
from tests.real.kube.api import Api, Object

NOW = timedelta()


def unplaced(name: str, **spec: Any) -> Object:
    """A pod that no scheduler takes."""
    return objects.pod(name, schedulerName="nobody", **spec)


def text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def ending(exit_code: int = 0, finished: str | None = "now") -> Object:
    """A status. `finished` None: no container says when; a pod that was evicted before it began looks so."""
    ended = {"exitCode": exit_code, "finishedAt": text(datetime.now(UTC)) if finished == "now" else finished}
    container = {"name": "main", "image": objects.IMAGE, "imageID": "", "ready": False, "restartCount": 0}
    return {
        "phase": "Succeeded" if exit_code == 0 else "Failed",
        "containerStatuses": [] if finished is None else [{**container, "state": {"terminated": ended}}],
    }


def ended_pod(
    api: Api, namespace: str, name: str, *, exit_code: int = 0, finished: str | None = "now", **how: Any
) -> Object:
    """As created; its status is that of a pod that ended."""
    made = api.create(unplaced(name, **how), namespace)
    api.patch("pods", namespace, name, {"status": ending(exit_code, finished)}, subresource="status")
    return made


def many_ended_pods(api: Api, namespace: str, names: Mapping[str, timedelta], threads: int = 4) -> None:
    """Each ended so long ago. Over connections that stay open: two questions for each pod."""
    work = list(names.items())
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(
            lambda share: _some_of_them(api, namespace, share), [work[n::threads] for n in range(threads)]
        ):
            pass


def _some_of_them(api: Api, namespace: str, names: Sequence[tuple[str, timedelta]]) -> None:
    connection = http.client.HTTPSConnection(api.host, api.port, timeout=60, context=api._context)
    head = {"Authorization": f"Bearer {api._token}", "Accept": "application/json"}
    path = f"/api/v1/namespaces/{namespace}/pods"

    def send(method: str, where: str, body: Object, content: str) -> None:
        connection.request(method, where, json.dumps(body), {**head, "Content-Type": content})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status < 300, f"{method} {where}: {answer.status} {said[:200]!r}"

    for name, ago in names:
        send("POST", path, {**unplaced(name, gpus=0), "apiVersion": "v1"}, "application/json")
        status = {"status": ending(0, text(datetime.now(UTC) - ago))}
        send("PATCH", f"{path}/{name}/status", status, "application/merge-patch+json")
    connection.close()
