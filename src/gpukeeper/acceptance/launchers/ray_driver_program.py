"""Runs as the driver of a Ray job: one actor on each node of a run, which starts the node's program there.

Python 3.8, standard library and the cluster's own Ray; imports nothing of gpukeeper. The plan comes with the job's
metadata. What runs on a node, and its deadline, is up to host.py, whose source is part of the plan; it ends with the
actor that started it. All that a reader needs is in the log of the job:

    gpukeeper-ray 1 {…}    a record: the run begins, the state of a node
    NODE | …               a line that the node's program wrote

A node's lines come before the record of its end. A job of the same name writes to the same log: its records have
another token. One actor for each node; for a run over all nodes together the GPUs are reserved at once, in a placement
group. The actors and the group belong to the job: Ray ends them with it.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from typing import Any

MARK = "gpukeeper-ray 1 "
PLAN = "gpukeeper.io/plan"
POLL_S = 1.0
TELL_S = 5.0  # between two looks at what a waiting node waits for
STUCK_S = 60.0  # after the deadline: the actor does not reply
TINY = 0.001  # of a node's own resource, which has 1
WORDS_MAX = 300
START_S = 60.0
RETENTION_S = 7 * 86400.0
OVER = ("ended", "vanished", "created")


def main() -> None:
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    plan = json.loads(zlib.decompress(base64.b64decode(job["metadata"][PLAN])))
    ray = importlib.import_module("ray")
    ray.init(log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the job is stopped: see `finally` in `drive`
    Driver(ray, plan).drive()


class NodeProgram:
    """On a node: passes requests to the host program."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.host: dict[str, Any] = {"__name__": "host"}
        exec(source, self.host)  # noqa: S102 - it came with the job

    def start(self, request: dict[str, Any]) -> None:
        """In a process of its own: it forks, which a process with Ray's threads may not. Its parent is this process."""
        program, *rest = request["command"]
        beside = os.path.join(os.path.dirname(sys.executable), program)  # noqa: PTH118, PTH120
        if "/" not in program and shutil.which(program) is None and os.access(beside, os.X_OK):
            program = beside
        sent = {**request, "command": [program, *rest], "do": "start", "holder": True}
        # Ray gives an actor without a CPU of its own one thread; what is measured must not depend on it.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", self.source],
            input=json.dumps(sent).encode(),
            capture_output=True,
            env=environment,
            timeout=START_S,
            check=False,
        )
        line = done.stdout.partition(self.host["MARK"])[2].partition(b"\n")[0]
        reply = json.loads(line) if line else {"ok": False, "error": done.stderr.decode("utf-8", "replace")[-900:]}
        if not reply["ok"]:
            raise RuntimeError(reply["error"])

    def read(self, request: dict[str, Any]) -> Any:
        """The state first: what an ended program wrote is then complete."""
        state = self.host["status"](request)[0]["state"]
        head, body = self.host["output"](request)
        if state is not None:
            state.pop("spec", None)
        return state, head, body

    def remove(self, request: dict[str, Any]) -> Any:
        return self.host["remove"](request)[0]["left"]


class Node:
    def __init__(self, number: int, described: dict[str, Any]) -> None:
        self.number = number
        self.name: str = described["node"]
        self.id: str = described["id"]
        self.ip: str = described["ip"]
        self.gpus: float = described["gpus"]
        self.environment: dict[str, str] = described["environment"]
        self.actor: Any = None
        self.reply: Any = None  # the one that is awaited
        self.doing = ""
        self.due = 0.0
        self.token, self.offset, self.rest = "", 0, b""
        self.state: Any = None  # of a program that ended
        self.said: Any = None
        self.over = False


class Driver:
    def __init__(self, ray: Any, plan: dict[str, Any]) -> None:
        self.ray, self.plan, self.began = ray, plan, time.monotonic()
        self.nodes = [Node(number, one) for number, one in enumerate(plan["nodes"])]
        self.group: Any = None

    def drive(self) -> None:
        self.tell(begin=self.ray.__version__)
        try:
            self.place()
            while self.active():
                self.step()
            self.tell(end=True)
        finally:  # also when the job is stopped
            for node in self.nodes:
                self.let_go(node)
            if self.group is not None:
                self.module("ray.util.placement_group").remove_placement_group(self.group)

    # Placing.

    def place(self) -> None:
        alive = self.alive()
        for node in self.nodes:
            if node.id not in alive:
                self.gone(node, "node-gone", "its Ray node is not alive any more")
        if self.plan["together"] and not self.reserved():
            return
        for node in self.active():
            strategy = self.strategy(node)
            if strategy is None:
                self.gone(node, "resources", "Ray reserved its GPUs on another node")
                continue
            made = self.ray.remote(NodeProgram).options(
                num_cpus=0, num_gpus=node.gpus, scheduling_strategy=strategy, max_restarts=0, max_task_retries=0
            )
            node.actor = made.remote(self.plan["host"])
            self.ask(node, "start")

    def alive(self) -> set[str]:
        return {one["NodeID"] for one in self.ray.nodes() if one["Alive"]}

    def strategy(self, node: Node) -> Any:
        module = self.module("ray.util.scheduling_strategies")
        if self.group is None:
            return module.NodeAffinitySchedulingStrategy(node.id, soft=False)
        table = self.module("ray.util.placement_group").placement_group_table(self.group)
        bundles = {where: int(bundle) for bundle, where in table["bundles_to_node_id"].items()}
        if node.id not in bundles:
            return None
        return module.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=bundles[node.id]
        )

    def reserved(self) -> bool:
        """All at once or not at all: nodes that wait for others would hold their GPUs meanwhile."""
        module = self.module("ray.util.placement_group")
        some = self.active()
        alone = len({node.ip for node in some}) == len(some)
        bundles: list[dict[str, float]] = []
        for node in some:
            bundle = {"GPU": node.gpus} if node.gpus else {}
            bundles.append({**bundle, f"node:{node.ip}": TINY} if alone or not bundle else bundle)
        more = {}
        if "bundle_label_selector" in inspect.signature(module.placement_group).parameters:
            more["bundle_label_selector"] = [{"ray.io/node-id": node.id} for node in some]
        self.group = module.placement_group(bundles, strategy="STRICT_SPREAD", **more)
        while not self.group.wait(TELL_S):
            alive = self.alive()
            dead = [node.name for node in some if node.id not in alive]
            if dead:
                why = f"the Ray node of {', '.join(dead)} died before the GPUs of all were free"
                for node in some:
                    self.gone(node, "node-gone" if node.name in dead else "resources", why)
                return False
            if self.waited() > self.plan["wait_s"]:
                for node in some:
                    self.gone(node, "resources", f"the GPUs of all nodes were not free at once: {self.lacking(node)}")
                return False
            for node in some:
                self.tell_waiting(node)
        return True

    # One round.

    def step(self) -> None:
        awaited = {node.reply: node for node in self.active() if node.reply is not None}
        done, _ = self.ray.wait(list(awaited), num_returns=len(awaited), timeout=POLL_S / 4) if awaited else ([], [])
        for one in done:
            self.take(awaited[one])
        now = time.monotonic()
        for node in self.active():
            if node.reply is None and now >= node.due:
                self.ask(node, node.doing)
            elif node.doing == "start" and now >= node.due:
                node.due = now + TELL_S
                self.tell_waiting(node)
                if self.waited() > self.plan["wait_s"]:
                    self.gone(node, "resources", f"Ray did not start it in time: {self.lacking(node)}")
            elif self.waited() > self.plan["deadline_s"] + STUCK_S:
                self.gone(node, "deadline", "it reached its deadline and does not reply")
        if not awaited:
            time.sleep(POLL_S / 4)

    def ask(self, node: Node, doing: str) -> None:
        request = {"run": self.plan["run"], "node": node.name}
        if doing == "start":
            request |= {
                "spec": None,
                "command": self.plan["command"],
                "environment": node.environment,
                "deadline_s": max(1.0, self.plan["deadline_s"] - self.waited()),
                "retention_s": RETENTION_S,
                "log_most": self.plan["log_most"],
                "nodes": [node.name],
            }
            node.due = time.monotonic() + TELL_S
        elif doing == "read":
            request |= {"offset": node.offset, "token": node.token, "most": self.plan["log_most"]}
        node.doing, node.reply = doing, getattr(node.actor, doing).remote(request)

    def take(self, node: Node) -> None:
        reply, node.reply = node.reply, None
        try:
            value = self.ray.get(reply)
        except Exception as error:  # of Ray, by its name: its classes differ between releases
            self.failed(node, error)
            return
        if node.doing == "start":
            self.tell(node=node.name, phase="running")
            node.doing = "read"
        elif node.doing == "read":
            self.take_output(node, *value)
        else:
            self.finish(node, value)

    def take_output(self, node: Node, state: Any, head: dict[str, Any], body: bytes) -> None:
        node.due = time.monotonic() + POLL_S
        if head["token"] is not None:
            node.token, node.offset = head["token"], head["offset"] + len(body)
        *lines, node.rest = (node.rest + body).split(b"\n")
        self.write(node, lines)
        if state is None:
            self.gone(node, "vanished", "its directory was removed by another program")
        elif state["state"] in OVER:
            self.write(node, [node.rest] if node.rest else [])
            node.state, node.doing, node.due = state, "remove", 0.0

    def finish(self, node: Node, left: list[str]) -> None:
        """All that it wrote is in the log of the job; nothing of it is on the node any more."""
        self.tell(node=node.name, state=node.state, left=left)
        node.over = True
        self.let_go(node)

    def failed(self, node: Node, error: Exception) -> None:
        kind, words = type(error).__name__, clean(str(error))
        if node.state is not None:  # all of its output is here; its actor died before it could tidy up
            self.finish(node, [])
        elif kind == "ActorUnavailableError":  # the network, perhaps: asked again until Ray decides
            node.due = time.monotonic() + POLL_S
        elif "RuntimeEnv" in kind:
            self.gone(node, "runtime-env", f"Ray could not set up the environment of its worker: {words}")
        elif "Unschedulable" in kind:
            self.gone(node, "resources", f"Ray cannot place it on its node: {self.lacking(node)}")
        elif node.id not in {one["NodeID"] for one in self.ray.nodes() if one["Alive"]}:
            self.gone(node, "node-gone", f"its Ray node died: {words}")
        elif "Actor" in kind:
            self.gone(node, "vanished", f"the Ray worker of its program ended: {words}")
        else:
            self.gone(node, "refused", f"its program could not be started: {words}")

    def gone(self, node: Node, code: str, reason: str) -> None:
        self.write(node, [node.rest] if node.rest else [])
        self.tell(node=node.name, phase="gone", code=code, reason=reason)
        node.over = True
        self.let_go(node)

    def let_go(self, node: Node) -> None:
        actor, node.actor, node.reply = node.actor, None, None
        if actor is not None:
            self.ray.kill(actor)

    # What is known.

    def active(self) -> list[Node]:
        return [node for node in self.nodes if not node.over]

    def waited(self) -> float:
        return time.monotonic() - self.began

    def tell_waiting(self, node: Node) -> None:
        reason = self.lacking(node)
        if reason != node.said:
            node.said = reason
            self.tell(node=node.name, phase="waiting", code="resources", reason=reason)

    def lacking(self, node: Node) -> str:
        """Which resource is missing on its node."""
        total = next((one["Resources"] for one in self.ray.nodes() if one["NodeID"] == node.id and one["Alive"]), None)
        if total is None:
            return "its Ray node is not alive any more"
        has = total.get("GPU", 0.0)
        if has < node.gpus:
            return f"its node announces {has:g} GPUs, {node.gpus:g} are requested"
        try:  # not part of Ray's documented interface
            free = self.module("ray._private.state").available_resources_per_node().get(node.id, {}).get("GPU", 0.0)
        except Exception:
            return f"its {node.gpus:g} GPUs may be in use; how many are free is unknown"
        if free < node.gpus:  # Ray does not tell its own reservation for this actor from those of others
            words = f"{free:g} of {has:g} GPUs of its node are free, {node.gpus:g} are needed"
            return f"{words}; or Ray has reserved them and is starting its worker"
        return "Ray starts a worker for it"

    def module(self, name: str) -> Any:
        return importlib.import_module(name)

    # The log of the job.

    def tell(self, **what: Any) -> None:
        put(MARK + json.dumps({"token": self.plan["token"], "at": time.time(), **what}))

    def write(self, node: Node, lines: list[bytes]) -> None:
        for line in lines:
            for part in line.decode("utf-8", "replace").split("\r"):
                put(f"{node.name} | {part}")


def put(line: str) -> None:
    """One call, one line: Ray writes to the same file."""
    sent = line.encode("utf-8", "replace") + b"\n"
    while sent:
        sent = sent[os.write(1, sent) :]


def clean(words: str) -> str:
    """Ray's messages are long, with hints and traces; what happened is in their first lines."""
    lines = [" ".join(line.split()) for line in words.splitlines() if line.strip()]
    said = "; ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines)
    return "".join(letter for letter in said if letter.isprintable())[:WORDS_MAX].rstrip(".")


if __name__ == "__main__":
    main()
