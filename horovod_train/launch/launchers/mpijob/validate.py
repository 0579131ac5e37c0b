"""Validation of an MPIJob before it is sent.

There are three kinds of problems: values that the API server rejects, values that make the operator create an
event and nothing else, and values that are ignored. Rules of the second kind follow ValidateMPIJob of
operator 0.8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from horovod_train.errors import ConfigError, Problem, did_you_mean
from horovod_train.launch.launchers.mpijob.document import Manifest, number, section, sections, text
from horovod_train.launch.launchers.mpijob.rules import name_problems
from horovod_train.system.optional import import_optional

SCHEMA = Path(__file__).with_name("mpijob-v2beta1.json")
ROLES = ("Launcher", "Worker")


def check(manifest: Mapping[str, object], source: str = "MPIJob") -> None:
    """Raise an error for an MPIJob that would not run.

    Raises:
        ConfigError: Lists all problems of the schema; if there are none, all others; with the field's path.
        UserError: jsonschema is not installed.
    """
    # The other rules require valid types.
    problems = list(schema_problems(manifest)) or [
        *operator_problems(manifest),
        *silent_problems(manifest),
    ]
    if problems:
        raise ConfigError(source, problems)


@cache
def strict_schema() -> Manifest:
    """Return the schema of the resource (CRD) as JSON Schema, in which unknown fields are errors."""
    schema = section(_strict(json.loads(SCHEMA.read_text(encoding="utf-8"))))
    metadata = {"type": "object", "required": ["name"]}
    return {**schema, "properties": {**section(schema, "properties"), "metadata": metadata}}


def _strict(node: object) -> object:
    if isinstance(node, list):
        return [_strict(child) for child in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(child) for key, child in node.items()}
    is_open = strict.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in strict
    if isinstance(strict.get("properties"), dict) and not is_open:
        strict["additionalProperties"] = False
    if strict.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    if found := re.fullmatch(r"int(32|64)", text(strict, "format")):
        largest = 2 ** (int(found[1]) - 1) - 1
        strict = {"minimum": -largest - 1, "maximum": largest, **strict}
    return strict


def schema_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems that the API server would report."""
    jsonschema = import_optional(
        "jsonschema", needed_by="checking an MPIJob", hint="pip install 'horovod_train[kubernetes]'"
    )
    validator = jsonschema.Draft202012Validator(strict_schema())
    for found in sorted(validator.iter_errors(manifest), key=lambda one: list(map(str, one.absolute_path))):
        path = [str(part) for part in found.absolute_path]
        if found.validator == "additionalProperties":
            known = found.schema["properties"]
            for name in sorted(set(found.instance) - set(known)):
                yield Problem(
                    ".".join([*path, name]), "", "is not a field of an MPIJob", did_you_mean(name, known)
                )
        elif found.validator == "required":
            missing = sorted(set(found.validator_value) - set(found.instance))
            for name in missing:
                yield Problem(".".join([*path, name]), "", "is missing")
        else:
            yield Problem(".".join(path), repr(found.instance)[:60], found.message[:200])


def operator_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield problems that the API server accepts, and the operator reports only in an event."""
    spec = section(manifest, "spec")
    replicas = section(spec, "mpiReplicaSpecs")
    num_workers = number(replicas, "Worker", "replicas", default=1)
    yield from name_problems("metadata.name", text(manifest, "metadata", "name"), num_workers)
    base = "spec.mpiReplicaSpecs"
    num_launchers = number(replicas, "Launcher", "replicas", default=1)
    if "Launcher" not in replicas:
        yield Problem(f"{base}.Launcher", "", "is missing", did_you_mean("Launcher", replicas))
    elif num_launchers != 1:
        yield Problem(f"{base}.Launcher.replicas", str(num_launchers), "must be 1")
    if num_workers < 1:
        yield Problem(f"{base}.Worker.replicas", str(num_workers), "must be at least 1")
    for role in ROLES:
        policy = text(replicas, role, "restartPolicy", default="Never")
        if policy not in ("Never", "OnFailure"):
            yield Problem(f"{base}.{role}.restartPolicy", repr(policy), "must be Never or OnFailure")
        if role in replicas:
            yield from _container_problems(f"{base}.{role}.template.spec", section(replicas, role))
    slots = number(spec, "slotsPerWorker", default=1)
    if slots < 1:
        yield Problem("spec.slotsPerWorker", str(slots), "must be at least 1")
    yield from _run_policy_problems(section(spec, "runPolicy"))


def _run_policy_problems(run_policy: Mapping[str, object]) -> Iterator[Problem]:
    clean = text(run_policy, "cleanPodPolicy", default="None")
    if clean not in ("None", "Running", "All"):
        yield Problem("spec.runPolicy.cleanPodPolicy", repr(clean), "must be None, Running or All")
    for name in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        found = number(run_policy, name, default=0)
        if found < 0:
            yield Problem(f"spec.runPolicy.{name}", str(found), "must not be negative")


def _container_problems(path: str, replica: Mapping[str, object]) -> Iterator[Problem]:
    """Yield problems that occur when pods are created."""
    pod = section(replica, "template", "spec")
    volumes = {text(volume, "name") for volume in sections(pod, "volumes")}
    containers = sections(pod, "containers")
    if not containers:
        yield Problem(f"{path}.containers", "", "must have at least one container")
    for place, container in enumerate(containers):
        at = f"{path}.containers.{place}"
        if not text(container, "image"):
            yield Problem(f"{at}.image", "", "is missing")
        yield from _mount_problems(at, sections(container, "volumeMounts"), volumes)
        yield from _port_problems(at, sections(container, "ports"))
        yield from _resource_problems(f"{at}.resources", section(container, "resources"))


def _mount_problems(path: str, mounts: list[Mapping[str, object]], volumes: set[str]) -> Iterator[Problem]:
    places = [text(mount, "mountPath") for mount in mounts]
    for index, mount in enumerate(mounts):
        name, place = text(mount, "name"), places[index]
        if name not in volumes:
            fix = did_you_mean(name, volumes)
            yield Problem(f"{path}.volumeMounts.{index}.name", repr(name), "is not a volume of this pod", fix)
        if places.count(place) > 1:
            yield Problem(f"{path}.volumeMounts.{index}.mountPath", repr(place), "is mounted twice")


def _port_problems(path: str, ports: list[Mapping[str, object]]) -> Iterator[Problem]:
    for index, port in enumerate(ports):
        found = number(port, "containerPort", default=0)
        if not 1 <= found <= 65535:
            yield Problem(f"{path}.ports.{index}.containerPort", str(found), "must be 1 to 65535")
    names = [text(port, "name") for port in ports if "name" in port]
    for name in sorted({name for name in names if names.count(name) > 1 or len(name) > 15}):
        yield Problem(f"{path}.ports", repr(name), "must be unique, and have at most 15 characters")


def _resource_problems(path: str, resources: Mapping[str, object]) -> Iterator[Problem]:
    limits = section(resources, "limits")
    for name, requested in section(resources, "requests").items():
        if name in limits and amount(str(requested)) > amount(text(limits, name)):
            yield Problem(
                f"{path}.requests.{name}", repr(requested), f"is more than its limit {limits[name]!r}"
            )


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity as a number.

    >>> amount("1500m"), amount("2Ki"), amount("3"), amount("1e3")
    (1.5, 2048.0, 3.0, 1000.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)(m|[kMGTPE]|[KMGTPE]i)?", quantity)
    if found is None:
        return float("nan")
    number, unit = float(found[1]), found[2] or ""
    if unit == "m":
        return number / 1000
    power = " KMGTPE".index(unit[0].upper()) if unit else 0
    return number * float((1024 if unit.endswith("i") else 1000) ** power)


def silent_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield values that are accepted, and do not have the intended effect."""
    spec = section(manifest, "spec")
    replicas = section(spec, "mpiReplicaSpecs")
    if "Worker" not in replicas:
        yield Problem("spec.mpiReplicaSpecs.Worker", "", "is missing: all ranks would run in the launcher")
    for name in replicas:
        if name not in ROLES:
            yield Problem(
                f"spec.mpiReplicaSpecs.{name}", "", "must be Launcher or Worker", did_you_mean(name, ROLES)
            )
    creation = text(spec, "launcherCreationPolicy", default="AtStartup")
    if creation not in ("AtStartup", "WaitForWorkersReady"):
        yield Problem(
            "spec.launcherCreationPolicy", repr(creation), "must be AtStartup or WaitForWorkersReady"
        )
    managers = ("kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue")
    manager = text(spec, "runPolicy", "managedBy", default=managers[0])
    if manager not in managers:
        yield Problem(
            "spec.runPolicy.managedBy",
            repr(manager),
            f"no controller would reconcile it; known: {', '.join(managers)}",
        )
    gang = section(spec, "runPolicy", "schedulingPolicy")
    workers = number(replicas, "Worker", "replicas", default=1)
    gang_size = number(gang, "minAvailable", default=workers + 1)
    if gang and creation == "WaitForWorkersReady" and gang_size > workers:
        yield Problem(
            "spec.runPolicy.schedulingPolicy.minAvailable",
            text(gang, "minAvailable", default="unset"),
            "would wait for a launcher that waits for the workers",
            f"set it to {workers}, the number of workers",
        )
