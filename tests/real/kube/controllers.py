"""The controllers of training, each as its own program on one control plane, started when a test first needs it.

Their webhooks are reached on loopback. Objects to begin with (`job`, `jobset`, `train_job` …) are in objects.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real.kube import binaries, nodes
from tests.real.kube.api import Object
from tests.real.kube.processes import listens

if TYPE_CHECKING:
    from tests.real.kube.control_plane import ControlPlane

TRAINERS = ("trainer-v2.1.0", "trainer-v2.3.0")
JOBSET_PATH = "jobset-x-k8s-io-v1alpha2-jobset"
# The training operator asks only whether this file is there; beds share it, so it stays.
_OPERATOR_CERTIFICATE = Path("/tmp/k8s-webhook-server/serving-certs/tls.crt")
_OPERATOR_SECRET = "training-operator-webhook-cert"
_OPERATOR_WEBHOOKS = "validator.training-operator.kubeflow.org"


def start_jobset(plane: ControlPlane) -> None:
    plane.install_crds("jobset")
    webhook, health = plane.block.port(), plane.block.port()
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(plane.certificates.folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
    }
    _start(plane, "jobset", config, lambda: listens(webhook))
    # Without its defaults the controller panics; without its checks a test could make what nobody can make.
    for kind, verb, operations in (
        ("MutatingWebhookConfiguration", "mutate", ["CREATE"]),
        ("ValidatingWebhookConfiguration", "validate", ["CREATE", "UPDATE"]),
    ):
        plane.api.apply(_jobset_webhook(plane, kind, f"https://127.0.0.1:{webhook}/{verb}-{JOBSET_PATH}", operations))
    plane.until(lambda: _defaults_work(plane), "JobSet's webhooks answer", 60)


def start_trainer(plane: ControlPlane, release: str) -> None:
    """One release at a time: both would work on the same objects."""
    for other in TRAINERS:
        if other != release:
            plane.stop(other)
    plane.need("jobset")
    plane.install_crds(release)
    webhook, health = plane.block.port(), plane.block.port()
    config = {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        # v2.1.0 takes every one of these for given.
        "health": {
            "healthProbeBindAddress": f"127.0.0.1:{health}",
            "readinessEndpointName": "readyz",
            "livenessEndpointName": "healthz",
        },
        "metrics": {"bindAddress": "0", "secureServing": False},
        "webhook": {"host": "127.0.0.1", "port": webhook},
        "leaderElection": {
            "leaderElect": False,
            "resourceLock": "leases",
            "resourceName": "trainer",
            "resourceNamespace": "default",
            "leaseDuration": "15s",
            "renewDeadline": "10s",
            "retryPeriod": "2s",
        },
        "controller": {"groupKindConcurrency": {"TrainJob.trainer.kubeflow.org": 5}},
        "certManagement": {"enable": False, "webhookServiceName": "trainer", "webhookSecretName": "trainer"},
        "clientConnection": {"qps": 50, "burst": 100},
    }
    _start(plane, release, config, lambda: listens(webhook))


def start_training_operator(plane: ControlPlane) -> None:
    plane.install_crds("training-operator")
    api = plane.api
    with suppress(OSError):
        _OPERATOR_CERTIFICATE.parent.mkdir(parents=True, exist_ok=True)
        _OPERATOR_CERTIFICATE.touch()
    # It waits for a secret to fill and webhooks to give its authority to. One without rules is never called.
    api.apply({"kind": "Namespace", "metadata": {"name": "kubeflow"}})
    api.apply({"kind": "Secret", "metadata": {"name": _OPERATOR_SECRET}}, "kubeflow")
    never = {
        "name": _OPERATOR_WEBHOOKS,
        "clientConfig": {"url": "https://127.0.0.1:1/never"},
        "rules": [],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = "ValidatingWebhookConfiguration"
    api.apply({"kind": kind, "metadata": {"name": _OPERATOR_WEBHOOKS}, "webhooks": [never]})
    webhook, health = plane.block.port(), plane.block.port()
    command = [
        *(binaries.program("training-operator"), "--leader-elect=false", "--metrics-bind-address=0"),
        *(f"--health-probe-bind-address=127.0.0.1:{health}", f"--webhook-server-port={webhook}"),
        *("--kube-api-qps=200", "--kube-api-burst=200"),
    ]
    plane.start_program(
        "training-operator",
        command,
        lambda: listens(webhook),
        env=_environment(plane, "training-operator"),
        deadline=90,
    )


def start_kuberay(plane: ControlPlane) -> None:
    plane.install_crds("kuberay")
    health = plane.block.port()
    command = [
        *(binaries.program("kuberay"), f"--kubeconfig={plane.kubeconfig()}", "--enable-leader-election=false"),
        *("--metrics-addr=0", f"--health-probe-bind-address=127.0.0.1:{health}"),
    ]
    plane.start_program("kuberay", command, lambda: listens(health))


STARTERS: dict[str, Callable[[ControlPlane], None]] = {
    "kwok": nodes.start_kwok,
    "jobset": start_jobset,
    "trainer-v2.1.0": lambda plane: start_trainer(plane, "trainer-v2.1.0"),
    "trainer-v2.3.0": lambda plane: start_trainer(plane, "trainer-v2.3.0"),
    "training-operator": start_training_operator,
    "kuberay": start_kuberay,
}


def before_stop(plane: ControlPlane, name: str) -> None:
    """A webhook that nobody answers would refuse every object of its kind."""
    if name == "jobset":
        plane.api.delete("mutatingwebhookconfigurations", None, "test-jobset")
        plane.api.delete("validatingwebhookconfigurations", None, "test-jobset")


def _start(plane: ControlPlane, name: str, config: Object, ready: Callable[[], bool]) -> None:
    file = plane.folder / f"{name}.config"
    file.write_text(json.dumps(config, indent=1))
    command = [binaries.program(name), f"--config={file}"]
    plane.start_program(name, command, ready, env=_environment(plane, name))


def _environment(plane: ControlPlane, name: str) -> dict[str, str]:
    """The certificate of webhooks is looked for below the temporary folder."""
    temporary = plane.folder / f"{name}.tmp"
    certificates = temporary / "k8s-webhook-server" / "serving-certs"
    if not certificates.exists():
        certificates.parent.mkdir(parents=True)
        certificates.symlink_to(plane.certificates.folder)
    return {"KUBECONFIG": str(plane.kubeconfig()), "TMPDIR": str(temporary)}


def _jobset_webhook(plane: ControlPlane, kind: str, url: str, operations: list[str]) -> Object:
    authority = base64.b64encode(plane.certificates.authority.read_bytes()).decode()
    of = {"apiGroups": ["jobset.x-k8s.io"], "apiVersions": ["v1alpha2"], "resources": ["jobsets"]}
    webhook = {
        "name": "jobset.test.local",
        "clientConfig": {"url": url, "caBundle": authority},
        "rules": [{**of, "operations": operations}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
        "timeoutSeconds": 10,
    }
    return {"kind": kind, "metadata": {"name": "test-jobset"}, "webhooks": [webhook]}


def _defaults_work(plane: ControlPlane) -> bool:
    """The API server learns of a webhook a moment after it is told."""
    template = {"spec": {"template": {"spec": {"containers": [{"name": "a", "image": "a"}], "restartPolicy": "Never"}}}}
    tried = {
        "kind": "JobSet",
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "metadata": {"name": "tried"},
        "spec": {"replicatedJobs": [{"name": "a", "template": template}]},
    }
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
    answer = plane.api.call("POST", path, tried, query={"dryRun": "All"})
    return answer.ok and "network" in answer.json["spec"]
