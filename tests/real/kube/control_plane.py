"""A private Kubernetes for tests: etcd, API server, controller manager, scheduler, all on loopback, in one folder.

    with control_plane() as plane:
        plane.gpu_node("n1", gpus=8)                      # of KWOK: pods there run, and end when told
        plane.api.create(job(...), "team-a")
        plane.finish_pod("team-a", "train-x7k2p", exit_code=0)
        plane.need("jobset"), plane.need("trainer-v2.3.0")   # controllers, started when first needed

Set-up and assertions go through the API server (api.py), never through gpukeeper's code. What runs on nodes is in
nodes.py, the controllers of training are in controllers.py, a real node is in real_node.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML

from tests.real.docker import kernel
from tests.real.kube import admission, binaries, controllers, nodes, real_node
from tests.real.kube.api import PATCHES, Api, Object, condition
from tests.real.kube.certificates import make_certificates, make_client_certificate
from tests.real.kube.processes import Block, Program, a_block, listens

PREFIX = "gkkube-"
KEEPER = "keeper"  # an administrator under the admission policy
USERS = 400  # tokens are read once, at the start: enough that every test may have people of its own
T = TypeVar("T")


class Cluster:
    """What our own and a given cluster have in common: an administrator's view."""

    own = False
    host: str
    port: int

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._namespaces = 0

    @property
    def api(self) -> Api:
        raise NotImplementedError

    def kubeconfig(self, user: str = "admin", *, namespace: str | None = None) -> Path:
        raise NotImplementedError

    def keeper_kubeconfig(self) -> Path:
        """For gpukeeper itself: an administrator under the admission policy that we ship, where the cluster is ours."""
        return self.kubeconfig()

    def new_namespace(self, stem: str = "t", labels: Mapping[str, str] | None = None) -> str:
        """With a name that no test had before."""
        self._namespaces += 1
        name = f"{stem}-{os.getpid()}-{self._namespaces}"
        self.api.create({"kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}})
        return name

    def drop_namespace(self, name: str) -> None:
        """Without waiting. No controller can make anything there any more; its pods go at once, whatever their node."""
        self.api.delete("namespaces", None, name)
        self.api.call("DELETE", f"/api/v1/namespaces/{name}/pods", query={"gracePeriodSeconds": 0})

    @staticmethod
    def until(read: Callable[[], T], what: str = "it came true", deadline: float = 120) -> T:
        """Look until the answer is true, and return it."""
        ends = time.monotonic() + deadline
        while not (seen := read()):
            assert time.monotonic() < ends, f"not within {deadline:.0f} s: {what} (last seen: {seen!r})"
            time.sleep(0.05)
        return seen


class GivenCluster(Cluster):
    """Somebody's cluster, by GPUKEEPER_TEST_KUBECONFIG. Nothing of ours runs there: no nodes, no controllers."""

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        super().__init__(folder)
        self._file = kubeconfig
        given = YAML(typ="safe").load(kubeconfig)
        context = _named(given["contexts"], given["current-context"])["context"]
        cluster = _named(given["clusters"], context["cluster"])["cluster"]
        user = _named(given["users"], context["user"])["user"]
        host, _, port = cluster["server"].removeprefix("https://").rstrip("/").partition(":")
        self.host, self.port = host, int(port or 443)
        self._token = user.get("token")
        self._context = ssl.create_default_context(cadata=_text(cluster, "certificate-authority", kubeconfig))
        if certificate := _text(user, "client-certificate", kubeconfig):
            pair = folder / "client.pem"
            pair.touch(0o600)
            pair.write_text(certificate + (_text(user, "client-key", kubeconfig) or ""))
            self._context.load_cert_chain(pair)
        else:
            assert self._token, f"{kubeconfig}: the tests read a token or a client certificate, no other login"

    @property
    def api(self) -> Api:
        return Api(self.host, self.port, self._context, self._token)

    def kubeconfig(self, user: str = "admin", *, namespace: str | None = None) -> Path:
        assert user == "admin", "there is only the user of GPUKEEPER_TEST_KUBECONFIG"
        return self._file


class ControlPlane(Cluster):
    """Our own."""

    own = True

    def __init__(self, folder: Path, block: Block) -> None:
        super().__init__(folder)
        self.block = block
        self.host, self.port = "127.0.0.1", block.port()
        self.certificates = make_certificates(folder / "certificates")
        self.start_seconds = 0.0
        self.programs: dict[str, Program] = {}
        self._context = ssl.create_default_context(cafile=str(self.certificates.authority))
        self._ends: list[Callable[[], None]] = []  # what more than a kill needs
        self._users = iter(range(1, USERS))
        self._grants = 0
        self._limited = False  # by the admission policy
        self._real_node: real_node.RealNode | None = None
        self._crds: dict[str, str] = {}  # by name, the release it is of
        (folder / "tokens.csv").write_text(_tokens())

    # The plane itself.

    def start(self) -> None:
        began = time.monotonic()
        etcd_port, peer_port = self.block.port(), self.block.port()
        self._start("etcd", self._etcd(etcd_port, peer_port), lambda: listens(etcd_port))
        self._start("kube-apiserver", self._apiserver(etcd_port), self.api.ready)
        self._start_beside("kube-scheduler")
        self._start_beside("kube-controller-manager")
        self.start_seconds = time.monotonic() - began

    def close(self) -> None:
        for end in reversed(self._ends):
            end()
        for program in reversed(self.programs.values()):
            program.kill()

    @property
    def api(self) -> Api:
        return self.api_as("admin")

    def api_as(self, user: str) -> Api:
        """`admin`, `nobody`, or one of `new_user`."""
        return Api(self.host, self.port, self._context, token_of(user))

    def api_with(self, token: str) -> Api:
        """For a token of a service account."""
        return Api(self.host, self.port, self._context, token)

    @property
    def apiserver(self) -> Program:
        return self.programs["kube-apiserver"]

    def stop_apiserver(self) -> None:
        """At once, as a crash does; etcd keeps what was written. Nobody listens on its port then."""
        self.apiserver.kill()

    def start_apiserver(self) -> None:
        self.apiserver.start(self.api.ready)

    def restart_apiserver(self) -> None:
        """Open connections break; the address, the tokens and the objects are as before."""
        self.stop_apiserver()
        self.start_apiserver()

    def healthy(self) -> None:
        """Between tests: what a test stopped or paused runs again."""
        for program in self.programs.values():
            if program.runs:
                program.resume()
        if not self.apiserver.runs:
            self.start_apiserver()
        for name in ("kube-scheduler", "kube-controller-manager"):
            if not self.programs[name].runs:
                self._restart_beside(name)

    # Users and their rights.

    def new_user(self, rules: Sequence[Mapping[str, Any]] = (), *, namespace: str | None = None) -> str:
        """Somebody without rights but these: of one namespace, or of all."""
        user = f"user-{next(self._users)}"
        if rules:
            self.grant(user, rules, namespace=namespace)
        return user

    def grant(self, user: str, rules: Sequence[Mapping[str, Any]], *, namespace: str | None = None) -> str:
        """Rules as in a Role, `apiGroups` [""] unless said. The name of role and binding, for `revoke`."""
        self._grants += 1
        name = f"test-{user}-{self._grants}".replace(":", "-")
        role, binding = ("Role", "RoleBinding") if namespace else ("ClusterRole", "ClusterRoleBinding")
        whole = [{"apiGroups": [""], **rule} for rule in rules]
        subject: Object = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}
        if user.startswith("system:serviceaccount:"):
            of, account = user.split(":")[2:]
            subject = {"kind": "ServiceAccount", "namespace": of, "name": account}
        self.api.create({"kind": role, "metadata": {"name": name}, "rules": whole}, namespace)
        reference = {"kind": role, "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        made = {"kind": binding, "metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        self.api.create(made, namespace)
        self._until_granted(user, whole[0], namespace)
        return name

    def _until_granted(self, user: str, rule: Mapping[str, Any], namespace: str | None) -> None:
        """The API server hears of a new role a moment after it was made."""
        asked = {"verb": rule["verbs"][0], "group": rule["apiGroups"][0], "resource": rule["resources"][0]}
        asked["resource"], _, asked["subresource"] = asked["resource"].partition("/")
        if names := rule.get("resourceNames"):
            asked["name"] = names[0]
        spec = {"user": user, "resourceAttributes": {**asked, "namespace": namespace or ""}}
        review = {"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        self.until(lambda: self.api.must("POST", path, review)["status"]["allowed"], f"{user} got its rights")

    def revoke(self, name: str, *, namespace: str | None = None) -> None:
        role, binding = ("roles", "rolebindings") if namespace else ("clusterroles", "clusterrolebindings")
        self.api.delete(binding, namespace, name)
        self.api.delete(role, namespace, name)

    def service_account(self, namespace: str, name: str, *, expires_seconds: int = 3600) -> str:
        """Make it, and a token for it."""
        self.api.apply({"kind": "ServiceAccount", "metadata": {"name": name}}, namespace)
        request = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.api.must("POST", path, {**request, "spec": {"expirationSeconds": expires_seconds}})
        return str(answer["status"]["token"])

    def kubeconfig(
        self, user: str = "admin", *, namespace: str | None = None, token: str | None = None, server: str | None = None
    ) -> Path:
        """A file for this user; `token` instead of the user's own, `server` instead of ours (where nobody listens)."""
        return self._write_kubeconfig(user, {"token": token or token_of(user)}, namespace, server)

    def kubeconfig_with_certificate(self, user: str, *, namespace: str | None = None) -> Path:
        """The same without a token: the user proves itself by a certificate."""
        certificate, key = make_client_certificate(self.certificates, user)
        login = {"client-certificate-data": _encoded(certificate), "client-key-data": _encoded(key)}
        return self._write_kubeconfig(user, login, namespace, None)

    def keeper_kubeconfig(self) -> Path:
        if not self._limited:
            admission.bind(self.api, KEEPER, f"test-{KEEPER}")
            self.until(
                lambda: admission.is_in_force(self.api_as(KEEPER), "default"), "the admission policy is in force"
            )
            self._limited = True
        return self.kubeconfig(KEEPER)

    def _write_kubeconfig(self, user: str, login: Mapping[str, str], namespace: str | None, server: str | None) -> Path:
        context: Object = {"cluster": "test", "user": user} | ({"namespace": namespace} if namespace else {})
        cluster = {
            "server": server or f"https://{self.host}:{self.port}",
            "certificate-authority-data": _encoded(self.certificates.authority),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "contexts": [{"name": "test", "context": context}],
            "users": [{"name": user, "user": dict(login)}],
        }
        text = json.dumps(config, indent=1)
        file = self.folder / f"{user}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.kubeconfig"
        if not file.exists():  # at once and once: programs read it while they start
            new = file.with_suffix(".new")
            new.write_text(text)
            new.replace(file)
        return file

    # Controllers and CRDs.

    def need(self, name: str) -> Program:
        """A controller by its name in pins.txt, started unless it runs; it may stop another release of itself."""
        if name not in self.programs or not self.programs[name].runs:
            controllers.STARTERS[name](self)
        return self.programs[name]

    def stop(self, name: str) -> None:
        """A controller is not there: what it does not do then is the point of the test. `need` starts it again."""
        if name in self.programs:
            controllers.before_stop(self, name)
            self.programs[name].kill()

    def install_crds(self, release: str) -> None:
        """As the release carries them, over another release's."""
        files = {".".join(reversed(file.stem.split("_"))): file for file in binaries.crds(release)}
        new = files.keys() - self._crds.keys()
        for name, file in files.items():
            if self._crds.get(name) != release:
                self._apply_file(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", file)
                self._crds[name] = release
        for name in new:
            self.api.wait_condition("customresourcedefinitions", None, name, "Established")
        if new:
            # The garbage collector looks for new kinds every half minute only, and at its start.
            self._restart_beside("kube-controller-manager")

    def start_program(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], object],
        *,
        env: Mapping[str, str] | None = None,
        deadline: float = 120,
    ) -> Program:
        """One more program of this plane, ended with it."""
        program = Program(self.folder, name, command, env=env)
        self.programs[name] = program
        program.start(ready, deadline)
        return program

    def at_the_end(self, what: Callable[[], None]) -> None:
        self._ends.append(what)

    # Nodes and pods.

    def gpu_node(self, name: str, gpus: int = 8, labels: Mapping[str, str] | None = None) -> Object:
        """A node of KWOK, Ready."""
        return nodes.gpu_node(self, name, gpus, labels)

    def real_node(self) -> real_node.RealNode:
        """The one of this plane, started when first asked for."""
        if self._real_node is None:
            self._real_node = real_node.start_real_node(self)
        return self._real_node

    def remove_node(self, name: str) -> None:
        self.api.delete("nodes", None, name)

    def finish_pod(self, namespace: str, name: str, exit_code: int = 0, *, reason: str | None = None) -> None:
        """Its containers end with this code, now."""
        nodes.finish_pod(self.api, namespace, name, exit_code, reason)

    def set_log(self, namespace: str, pod: str, text: str) -> None:
        """What `GET pods/x/log` says of a pod on a KWOK node."""
        nodes.set_log(self, namespace, pod, text)

    def memory_mib(self) -> dict[str, int]:
        return {name: program.memory_mib for name, program in self.programs.items() if program.runs}

    # Below here: how.

    def _start(self, name: str, arguments: Sequence[str], ready: Callable[[], object]) -> None:
        self.start_program(name, [binaries.program(name), *arguments], ready)

    def _start_beside(self, name: str) -> None:
        """The scheduler, the controller manager: they work with the API server as the administrator. Their rates stay
        as they are in clusters: a quicker garbage collector wins races that it loses there (Trainer's TrainJobs that
        are deleted in the foreground)."""
        config, port = str(self.kubeconfig()), self.block.port()
        keys = self.certificates
        arguments = [
            *(
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
            ),
            *("--bind-address=127.0.0.1", f"--secure-port={port}", "--leader-elect=false"),
            *(f"--tls-cert-file={keys.certificate}", f"--tls-private-key-file={keys.key}"),
        ]
        if name == "kube-controller-manager":
            arguments += [
                "--use-service-account-credentials=false",
                f"--service-account-private-key-file={keys.tokens_key}",
                f"--root-ca-file={keys.authority}",
                "--node-monitor-period=1s",  # a node that becomes Ready is taken into use at the next look
                f"--flex-volume-plugin-dir={self.folder}/volume-plugins",  # not one of the host
                "--controllers=*,-node-ipam-controller,-node-route-controller,-service-lb-controller,"
                "-cloud-node-lifecycle-controller,-certificatesigningrequest-signing-controller",
            ]
        self._start(name, arguments, lambda: self._is_healthy(port))

    def _is_healthy(self, port: int) -> bool:
        """Not only that it listens, which these do before they have read their kubeconfig."""
        return Api(self.host, port, self._context, None).ready("/healthz")

    def _restart_beside(self, name: str) -> None:
        port = next(int(word.partition("=")[2]) for word in self.programs[name].command if "--secure-port" in word)
        self.programs[name].kill()
        self.programs[name].start(lambda: self._is_healthy(port))

    def _etcd(self, port: int, peer_port: int) -> list[str]:
        here, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        return [
            *("--name=test", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync", "--log-level=warn"),
            *(f"--listen-client-urls={here}", f"--advertise-client-urls={here}"),
            *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
            f"--initial-cluster=test={peers}",
        ]

    def _apiserver(self, etcd_port: int) -> list[str]:
        keys = self.certificates
        return [
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self.port}"),
            "--endpoint-reconciler-type=none",  # a loopback address would be refused there
            f"--cert-dir={self.folder}/apiserver",
            *(f"--tls-cert-file={keys.certificate}", f"--tls-private-key-file={keys.key}"),
            *(f"--service-account-key-file={keys.tokens_key}", f"--service-account-signing-key-file={keys.tokens_key}"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *(f"--token-auth-file={self.folder}/tokens.csv", f"--client-ca-file={keys.authority}"),
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",  # pods need no token here
            *("--allow-privileged=true", "--profiling=false"),
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _apply_file(self, path: str, file: Path) -> None:
        """YAML goes as it is: reading a megabyte of it here takes longer than all else."""
        api = self.api
        answer = _raw_patch(api, path, file.read_bytes())
        assert answer < 400, f"{file.name}: the API server answered {answer}"


def token_of(user: str) -> str:
    return f"token-of-{user}"


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """Started; ended and removed afterwards. What killed runs left is removed before."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with a_block(folder, _remove_rest) as block:
            plane = ControlPlane(folder, block)
            try:
                plane.start()
                yield plane
            finally:
                plane.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def given_cluster(kubeconfig: str) -> Iterator[GivenCluster]:
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        yield GivenCluster(Path(folder), Path(kubeconfig))


def is_finished(job: Mapping[str, Any] | None) -> bool:
    """Of a Job."""
    return any(condition(job, kind) == "True" for kind in ("Complete", "Failed"))


def _remove_rest(number: int, folder: Path) -> None:
    if folder.name.startswith(PREFIX):
        for node in folder.glob("node*"):
            real_node.restore_kernel(node)
        kernel.remove_all_of(folder)
    real_node.remove_rest(number)


def _raw_patch(api: Api, path: str, body: bytes) -> int:
    return api.call(
        "PATCH", path, body, query={"fieldManager": "test", "force": "true"}, content_type=PATCHES["apply"], deadline=60
    ).status


def _tokens() -> str:
    lines = [f'{token_of("admin")},admin,0,"system:masters"', f"{token_of('nobody')},nobody,nobody"]
    lines += [f'{token_of(KEEPER)},{KEEPER},{KEEPER},"system:masters"']
    lines += [f'{token_of(f"user-{n}")},user-{n},{n},"people"' for n in range(1, USERS)]
    return "\n".join(lines) + "\n"


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _text(entry: Mapping[str, Any], key: str, kubeconfig: Path) -> str | None:
    """Inline, or in a file beside the kubeconfig."""
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return (kubeconfig.parent / entry[key]).read_text() if key in entry else None
