"""Runs as the driver of a Ray job: one short task on each node, which runs `gpukeeper plan` or `apply` there.

Python 3.8, standard library and the cluster's own Ray; imports nothing of gpukeeper. The plan comes with the job's
metadata. What a reader needs is in the log of the job, one line each: `gpukeeper-ray-pass 1 {…}`.

A task resets the idle timer of its node, by which an autoscaler removes it. So a node on which nothing ran since the
last pass there is not visited again before `again_s` is over. When that was is kept in the cluster's own store, by node
id, and goes with the cluster. The head is never scaled down, and the driver itself makes it busy: for the head only
what was read before the job counts.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

MARK = "gpukeeper-ray-pass 1 "
PLAN = "gpukeeper.io/plan"
VISITS = "gpukeeper/visit/"
HEAD = "node:__internal_head__"
SLACK_S = 10.0  # between the end of a task and when Ray calls its node idle
LATE_S = 60.0  # after its deadline a task has no reply any more
WORDS_MAX = 600
# Of a place, what is printed for many nodes; the other fields list everything that is kept.
SHOWN = (
    *("platform", "place", "steps", "outcomes", "deferred", "unseen", "nodes", "bytes_back"),
    *("leased", "stopped", "breaker", "paused"),
)


def main() -> None:
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    plan = json.loads(zlib.decompress(base64.b64decode(job["metadata"][PLAN])))
    ray = importlib.import_module("ray")
    ray.init(log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the job is stopped; Ray ends its tasks
    Driver(ray, plan).drive()


def one_pass(request: dict[str, Any]) -> dict[str, Any]:
    """On a node. Without `act`: what it would do."""
    program = request["program"]
    beside = os.path.join(os.path.dirname(sys.executable), program[0])  # noqa: PTH118, PTH120
    if "/" not in program[0] and shutil.which(program[0]) is None and os.access(beside, os.X_OK):
        program = [beside, *program[1:]]
    verb = ["apply", "--yes"] if request["act"] else ["plan"]
    with tempfile.NamedTemporaryFile("w", prefix="gpukeeper-", suffix=".yaml") as policy:
        policy.write(request["policy"])
        policy.flush()
        command = [*program, *verb, "--policy", policy.name, "--platform", "ray", "--json"]
        # The job's own driver, supervisor and task do not count as work on the node.
        environment = {**os.environ, "GPUKEEPER_RAY_JOB": request["job"]}
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, check=False, timeout=request["deadline_s"]
            )
        except subprocess.TimeoutExpired:
            return {"code": 124, "problem": f"it did not end within {request['deadline_s']:.0f} s"}
        except OSError as error:
            advice = "Install gpukeeper there, or name it with --option program=PATH"
            return {"code": 127, "problem": f"{program[0]}: {error.strerror}. {advice}"}
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[-WORDS_MAX:]
    took = time.monotonic() - began
    try:
        found = json.loads(done.stdout)
        places = [{name: one[name] for name in SHOWN if name in one} for one in found["places"]]
        mode = found["policy"]["mode"]
        return {"code": done.returncode, "mode": mode, "places": places, "said": said, "seconds": took}
    except (ValueError, KeyError, TypeError):
        return {"code": done.returncode, "problem": said or "its output cannot be read"}


class Driver:
    def __init__(self, ray: Any, plan: dict[str, Any]) -> None:
        self.ray, self.plan = ray, plan
        context = ray.get_runtime_context()
        self.job, self.gcs, self.node = context.get_job_id(), context.gcs_address, context.get_node_id()

    def drive(self) -> None:
        self.tell(begin=self.ray.__version__)
        running = {}
        alive = {one["NodeID"]: one for one in self.ray.nodes() if one["Alive"]}
        idle = self.idle_times()
        for node in self.plan["nodes"]:
            why = self.why_not(node, alive.get(node), idle)
            if why:
                self.tell(node=node, skipped=why)
            else:
                running[self.start(node)] = node
        late = time.monotonic() + self.plan["deadline_s"] + LATE_S
        while running and time.monotonic() < late:
            done, _ = self.ray.wait(list(running), num_returns=1, timeout=1.0)
            for one in done:
                self.finish(running.pop(one), one)
        for one, node in running.items():
            self.ray.cancel(one, force=True)
            self.tell(node=node, reply={"code": 1, "problem": "Ray did not start or did not end its task in time"})
        self.tell(end=True)

    def start(self, node: str) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        task = self.ray.remote(one_pass).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        names = ("program", "act", "policy", "deadline_s")
        # This process and its supervisor are on the head; there they do not count as work either.
        here_too = [str(os.getpid())] if node == self.node else []
        job = ",".join((self.job, self.plan["submission"], *here_too))
        return task.remote({**{name: self.plan[name] for name in names}, "job": job})

    def finish(self, node: str, task: Any) -> None:
        try:
            reply = self.ray.get(task)
        except Exception as error:  # of Ray, by its name: its classes differ between releases
            words = " ".join(str(error).split())[:WORDS_MAX]
            reply = {"code": 1, "problem": f"its task ended ({type(error).__name__}): {words}"}
        else:
            self.remember(node, reply)
        self.tell(node=node, reply=reply)

    # How long a node has been idle, and when it was visited.

    def idle_times(self) -> Any:
        """By node id: seconds, or None for one that is not idle. A sentence: they could not be read."""
        try:
            sdk = importlib.import_module("ray.autoscaler.v2.sdk")  # not part of Ray's documented interface
            status = sdk.get_cluster_status(self.gcs)
            found = {one.node_id: None for one in status.active_nodes}
            return {**found, **{one.node_id: one.resource_usage.idle_time_ms / 1000 for one in status.idle_nodes}}
        except Exception as error:
            return f"Ray does not say how long its nodes have been idle: {type(error).__name__}: {error}"[:WORDS_MAX]

    def why_not(self, node: str, described: Any, idle: Any) -> str:
        if described is None:
            return "its Ray node is not alive any more"
        if HEAD in described["Resources"]:
            return ""
        if isinstance(idle, str):
            return idle
        if idle.get(node) is None:
            return "work has begun there"
        visit = self.visit(node)
        now = time.time()
        ran = visit is None or now - idle[node] > visit["at"] + SLACK_S
        if visit is not None and ran:
            visit["applied"] = None
            self.store(node, visit)
        applied = None if visit is None else visit["applied"]
        if self.plan["act"] and applied is not None and now - applied < self.plan["again_s"]:
            return f"nothing ran there since the last pass, {(now - applied) / 60:.0f} minutes ago"
        return ""

    def remember(self, node: str, reply: dict[str, Any]) -> None:
        now = time.time()
        before = self.visit(node)
        complete = self.plan["act"] and "problem" not in reply and reply["code"] == 0
        self.store(node, {"at": now, "applied": now if complete else (before or {}).get("applied")})

    def visit(self, node: str) -> Any:
        found = self.kv()._internal_kv_get(VISITS + node)
        try:
            visit = json.loads(found) if found else None
            return {"at": float(visit["at"]), "applied": visit["applied"]} if visit else None
        except (ValueError, KeyError, TypeError):
            return None

    def store(self, node: str, visit: dict[str, Any]) -> None:
        self.kv()._internal_kv_put(VISITS + node, json.dumps(visit), overwrite=True)

    def kv(self) -> Any:
        return importlib.import_module("ray.experimental.internal_kv")

    def tell(self, **what: Any) -> None:
        """One call, one line: Ray writes to the same file."""
        sent = (MARK + json.dumps({"token": self.plan["token"], **what})).encode() + b"\n"
        while sent:
            sent = sent[os.write(1, sent) :]


if __name__ == "__main__":
    main()
