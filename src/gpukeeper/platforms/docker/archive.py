"""What is saved of a container before its removal, and how it is created again from that. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.translate import ANONYMOUS

MANIFEST, LOG, EVENTS, PACKAGES, CHANGES = "manifest.json", "log.txt", "events.jsonl", "packages.txt", "changes.txt"
BEFORE_STOP = "stop/"  # captured when gpukeeper stopped it, before the restart policy was disabled
_FRAME = struct.Struct(">BxxxL")


class CreateRequest(msgspec.Struct, frozen=True):
    """How to create it again."""

    name: str
    image: str  # the id it was created from; its name may refer to another image now
    body: Mapping[str, Any]
    networks: Mapping[str, Any]  # networks to connect after creation


def demultiplexed(stream: bytes) -> bytes:
    """The log of a container without a terminal is a sequence of frames, each with its length."""
    parts, at = [], 0
    while at + _FRAME.size <= len(stream):
        kind, length = _FRAME.unpack_from(stream, at)
        if kind > 2 or stream[at + 1 : at + 4] != b"\0\0\0":
            return stream  # not framed
        parts.append(stream[at + _FRAME.size : at + _FRAME.size + length])
        at += _FRAME.size + length
    return b"".join(parts)


def recipe(evidence: Evidence) -> CreateRequest | Unknown:
    try:
        return _recipe(evidence)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Unknown(f"its captured manifest cannot be read: {error}")


def _recipe(evidence: Evidence) -> CreateRequest:
    manifest = reading.decode(evidence.files[MANIFEST], type=dict[str, Any])
    config, host = dict(manifest["Config"]), dict(manifest["HostConfig"])
    name, old_id = str(manifest["Name"]).removeprefix("/"), str(manifest["Id"])
    image = str(manifest["Image"])
    host["RestartPolicy"] = restart_policy(evidence) or host.get("RestartPolicy")
    if config.get("Hostname") == old_id[:12]:
        del config["Hostname"]  # assigned by the engine, which assigns a new one
    _keep_volumes(manifest, config, host)
    _in_request_format(host)
    joined = dict((manifest.get("NetworkSettings") or {}).get("Networks") or {})
    mode = str(host.get("NetworkMode") or "default")
    others = {
        network: {"Aliases": (facts or {}).get("Aliases"), "IPAMConfig": (facts or {}).get("IPAMConfig")}
        for network, facts in joined.items()
        if network not in {mode, "bridge" if mode == "default" else mode, "host", "none"}
    }
    return CreateRequest(name, image, {**config, "HostConfig": host}, others)


def restart_policy(evidence: Evidence) -> Mapping[str, Any] | None:
    """The policy that its owner set: the one from before our stop, if gpukeeper stopped it first."""
    for name in (BEFORE_STOP + MANIFEST, MANIFEST):
        if name in evidence.files:
            try:
                manifest = reading.decode(evidence.files[name], type=dict[str, Any])
                policy = manifest["HostConfig"]["RestartPolicy"]
            except (KeyError, TypeError, msgspec.DecodeError):
                continue
            if isinstance(policy, dict) and policy.get("Name"):
                return policy
    return None


def _keep_volumes(manifest: Mapping[str, Any], config: dict[str, Any], host: dict[str, Any]) -> None:
    """Anonymous volumes were not removed with it, so it gets the same ones again."""
    binds, volumes = list(host.get("Binds") or ()), dict(config.get("Volumes") or {})
    for mount in manifest.get("Mounts") or ():
        name, where = str(mount.get("Name", "")), str(mount.get("Destination", ""))
        if mount.get("Type") == "volume" and ANONYMOUS.fullmatch(name) and not _bound(binds, where):
            binds.append(f"{name}:{where}")
            volumes.pop(where, None)
            # Requested by --mount: the engine refuses two entries for one target.
            host["Mounts"] = [one for one in host.get("Mounts") or () if one.get("Target") != where] or None
    host["Binds"] = binds or None
    config["Volumes"] = volumes or None


def _in_request_format(host: dict[str, Any]) -> None:
    """Podman reports limits under other names (RLIMIT_NOFILE) than it accepts (nofile), and devices without the access
    that it demands: the one of both engines that is meant if none is written."""
    if host.get("Devices"):
        host["Devices"] = [
            {**one, "CgroupPermissions": one.get("CgroupPermissions") or "rwm"} for one in host["Devices"]
        ]
    if host.get("Ulimits"):
        host["Ulimits"] = [
            {**limit, "Name": str(limit.get("Name", "")).removeprefix("RLIMIT_").lower()} for limit in host["Ulimits"]
        ]


def _bound(binds: list[Any], where: str) -> bool:
    return any(str(bind).split(":")[1:2] == [where] for bind in binds)
