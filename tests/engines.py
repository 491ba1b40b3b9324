"""Real engines: there, or a skip that says how to get one; required (GPUKEEPER_REQUIRE=gpu,docker,…): a failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.real.ansible import installation as ansible_installation
from tests.real.image import acceptance_image
from tests.real.kube import binaries, helm
from tests.real.postgres import server as postgres_server
from tests.real.ray import clusters as ray_clusters
from tests.real.torch import installation as torch_installation

HOW = {
    "ansible": "needs ansible-core and ansible-lint: `make ansible` installs them (pip, one minute, once)",
    "chromium": "needs a browser: apt-get install chromium",
    "docker": "needs root and a dockerd of its own: apt-get install docker.io iptables busybox-static, run as root",
    "gpu": "needs an NVIDIA GPU with its driver loaded: run the tests on a GPU machine",
    "helm": "needs helm: `make helm` builds it (Go, 4 minutes, once)",
    "image": "needs root and the root filesystem of the image: apt-get install mmdebstrap, then `make torch rootfs`",
    "kubelet": (
        "needs root, `make kube`, containerd and CNI plugins: apt-get install docker.io containernetworking-plugins "
        "busybox-static, run as root"
    ),
    "kubernetes": "needs a control plane of its own: `make kube` builds it (Go, 20 minutes, once); openssl",
    "podman": "needs root and podman: apt-get install podman busybox-static, run as root",
    "postgres": "needs a PostgreSQL of its own: apt-get install postgresql (its service may stay stopped), setpriv",
    "prometheus": "needs a Prometheus of its own: apt-get install prometheus (its service may stay stopped)",
    "promtool": "needs promtool: apt-get install prometheus",
    "pypi": "needs a package index that pip reaches, to download the pinned wheels; and unshare",
    "ray": "needs the releases of Ray that tests run: `make ray` installs them (pip, 5 minutes, once)",
    "root": "needs root, to look into every process: run the tests as root",
    "ssh": "needs root, ssh and an sshd of its own: apt-get install openssh-server iproute2, run as root",
    "systemd": "needs systemd-analyze: apt-get install systemd (nothing has to run)",
    "systemd-nspawn": (
        "needs root and a machine that may boot systemd in a container: apt-get install mmdebstrap systemd-container, "
        "then `make systemd` as root"
    ),
    "torch": "needs the release of PyTorch that tests run: `make torch` installs it (pip, one minute, once)",
    "tmpfs": "needs root and mount(2) for a small full disk: run the tests as root",
}


def require(engine: str, there: bool) -> None:
    """Skip with the way to get it, or fail when this run must have it."""
    if there:
        return
    words = f"{engine}: {HOW[engine]}"
    if engine in os.environ.get("GPUKEEPER_REQUIRE", "").split(","):
        pytest.fail(f"{words} (GPUKEEPER_REQUIRE asks for it)")
    pytest.skip(words)


def has_ansible() -> bool:
    """Those releases, installed beside the repository; gpukeeper itself never uses them."""
    return ansible_installation.is_installed()


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def has_chromium() -> bool:
    """Without a window; nobody's own profile is used."""
    return chromium() is not None


def has_docker() -> bool:
    """The programs for a private engine, and the rights; the host's own engine is never used."""
    return _root_with("dockerd", "busybox", "ip", "setpriv")


def has_helm() -> bool:
    return helm.program().exists()


def has_image() -> bool:
    """What takes long to build; gpukeeper itself is installed in it as it is in this working tree."""
    return os.geteuid() == 0 and acceptance_image.is_built()


def has_podman() -> bool:
    return _root_with("podman", "busybox", "setpriv")


def has_kube() -> bool:
    """The programs of a private control plane and its controllers; nobody's own cluster is used unless named."""
    return not binaries.missing(*binaries.PLANE, *binaries.CONTROLLERS) and _has("openssl", "setpriv")


def has_kubelet() -> bool:
    """What a real node needs besides."""
    there = has_kube() and not binaries.missing(*binaries.NODE) and binaries.cni_plugins() is not None
    return there and _root_with("containerd", "ctr", "runc", "busybox", "ip")


def has_postgres() -> bool:
    """The programs for a private one; a PostgreSQL that runs on this machine is never used."""
    return postgres_server.programs() is not None and _has("setpriv")


def has_prometheus() -> bool:
    """The programs for a private one; a Prometheus that runs on this machine is never asked."""
    return _has("prometheus", "promtool", "setpriv")


def has_promtool() -> bool:
    return _has("promtool")


def has_systemd_analyze() -> bool:
    return _has("systemd-analyze")


def has_ray(version: str = ray_clusters.NEWEST) -> bool:
    """That release, installed beside the repository; gpukeeper itself never imports it."""
    return ray_clusters.is_installed(version)


def has_sshd() -> bool:
    """The programs for private servers; this machine's own is never used. It is often not on the PATH."""
    return _root_with("ssh", "ssh-keygen", "ip") and Path("/usr/sbin/sshd").exists()


def has_torch() -> bool:
    """That release, installed beside the repository; gpukeeper itself never imports it."""
    return torch_installation.is_installed()


def _has(*programs: str) -> bool:
    return all(shutil.which(program) for program in programs)


def _root_with(*programs: str) -> bool:
    return os.geteuid() == 0 and _has(*programs)
