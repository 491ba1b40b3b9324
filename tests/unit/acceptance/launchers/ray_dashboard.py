"""A Ray dashboard in memory: the Jobs API and the state API, as releases 2.40 to 2.60 answer. No job runs: a test
writes the log that its driver would write."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from gpukeeper.acceptance.launchers.ray_driver_program import MARK

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")


def a_node(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "node_id": f"{number:x}" * 56,
        "node_ip": f"10.0.0.{number}",
        "node_name": f"10.0.0.{number}",
        "state": "ALIVE",
        "state_message": None,
        "is_head_node": number == 1,
        "resources_total": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H200": 1.0},
        "labels": {"rack": f"r{number % 2}"},
        **changes,
    }


class FakeDashboard:
    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"nodes": list(nodes), "actors": [], "placement_groups": []}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.token: str | None = None
        self.logins: list[str | None] = []
        self.asked: list[tuple[str, str]] = []
        self.keeps = False  # a deleted job stays
        self.ghosts = 0  # how often an empty record comes back after a job was deleted
        self.ignores_stop = False
        self.url = ""

    def answer(self, method: str, path: str, body: bytes, login: str | None) -> tuple[int, str, bytes]:
        self.asked.append((method, path))
        self.logins.append(login)
        if self.token is not None and login != f"Bearer {self.token}":
            return (403, "text/plain", b"Forbidden") if login else (401, "text/plain", b"Unauthorized")
        parts = urlsplit(path).path.strip("/").split("/")
        if parts[:2] == ["api", "version"]:
            return _json({"version": "4", "ray_version": "2.60.0", "session_name": "session_1"})
        if parts[:2] == ["api", "v0"]:
            return self._listed(parts[2])
        return self._job(method, parts[2:], body)

    def _listed(self, kind: str) -> tuple[int, str, bytes]:
        rows = [one for one in self.rows[kind] if one["state"] not in ("REMOVED",) and "actor_id" not in one]
        rows += [one for one in self.rows[kind] if "actor_id" in one and one["state"] != "DEAD"]
        page = {"result": rows, "total": len(rows), "num_after_truncation": len(rows), "num_filtered": len(rows)}
        return _json({"result": True, "msg": "", "data": {"result": page}})

    def _job(self, method: str, parts: list[str], body: bytes) -> tuple[int, str, bytes]:
        if not parts:
            return self._submit(json.loads(body)) if method == "POST" else _json(list(self.jobs.values()))
        job = self.jobs.get(parts[0])
        if job is None:
            return 404, "text/plain", f"Job {parts[0]} does not exist".encode()
        if parts[1:] == ["logs"]:
            return _json({"logs": self.logs[parts[0]]})
        if parts[1:] == ["stop"]:
            job["status"] = job["status"] if self.ignores_stop or job["status"] in TERMINAL else "STOPPED"
            return _json({"stopped": True})
        if method == "DELETE":
            if job["status"] not in TERMINAL:
                return 500, "text/plain", b"Traceback\nRuntimeError: it is in a non-terminal state"
            if self.ghosts:
                self.ghosts -= 1
                self.jobs[parts[0]] = {
                    "submission_id": parts[0],
                    "status": "FAILED",
                    "message": "it died",
                    "metadata": None,
                }
            elif not self.keeps:
                del self.jobs[parts[0]]
            return _json({"deleted": True})
        return _json(job)

    def _submit(self, sent: dict[str, Any]) -> tuple[int, str, bytes]:
        name = sent["submission_id"]
        if name in self.jobs:
            return 500, "text/plain", b"Traceback\nValueError: Job with submission_id already exists."
        job = {"type": "SUBMISSION", "status": "PENDING", "message": "", "job_id": None, **sent}
        self.jobs[name] = job
        self.logs.setdefault(name, "Running entrypoint\n")
        return _json({"submission_id": name})

    # What the driver would do.

    def runs(self, run: str) -> None:
        self.jobs[f"gpukeeper-{run}"] |= {"status": "RUNNING", "job_id": "02000000"}
        self.tell(run, begin="2.60.0")

    def tell(self, run: str, **what: Any) -> None:
        token = self.jobs[f"gpukeeper-{run}"]["metadata"]["gpukeeper.io/token"]
        self.logs[f"gpukeeper-{run}"] += MARK + json.dumps({"token": token, "at": 1767225600.0, **what}) + "\n"

    def write(self, run: str, line: str) -> None:
        self.logs[f"gpukeeper-{run}"] += line + "\n"

    def ends(self, run: str, status: str, message: str = "") -> None:
        self.jobs[f"gpukeeper-{run}"] |= {"status": status, "message": message}


def ended(node: str, **changes: Any) -> dict[str, Any]:
    return {"run": "r1", "node": node, "state": "ended", "why": "", "exit_code": 0, "ended": 1767225660.0, **changes}


def _json(what: Any) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(what).encode()


@contextmanager
def served(dashboard: FakeDashboard) -> Iterator[FakeDashboard]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, sent = dashboard.answer(self.command, self.path, body, self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def do_POST(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    dashboard.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield dashboard
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
