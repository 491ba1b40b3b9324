"""The admission policy of examples/kubernetes, bound to one user of a control plane."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML

from tests.real.kube.api import Api, Object, path_of

FILE = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "admission-policy.yaml"
ACCOUNT = "system:serviceaccount:gpukeeper:gpukeeper"


def admission_policy(user: str, name: str) -> tuple[Object, Object]:
    """The policy and its binding as they are shipped, for this user."""
    policy, binding = YAML(typ="safe").load_all(FILE.read_text().replace(ACCOUNT, user))
    policy["metadata"]["name"] = binding["metadata"]["name"] = binding["spec"]["policyName"] = name
    return policy, binding


def bind(api: Api, user: str, name: str) -> None:
    for one in admission_policy(user, name):
        api.create(one)


def unbind(api: Api, name: str) -> None:
    api.delete("validatingadmissionpolicybindings", None, name)
    api.delete("validatingadmissionpolicies", None, name)


def is_in_force(as_user: Api, namespace: str) -> bool:
    """The API server hears of a policy a moment after it was made."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}}
    pod["spec"] = {"containers": [{"name": "main", "image": "none"}]}
    answer = as_user.call("POST", path_of("pods", namespace), pod, query={"dryRun": "All"})
    return answer.status == 403 and b"ValidatingAdmissionPolicy" in answer.raw
