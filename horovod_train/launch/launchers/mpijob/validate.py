"""Is this MPIJob one that the API server accepts and the operator carries out?

Three kinds of mistakes: what the API server refuses, what the operator mentions in an event and then
does nothing, and what nobody notices. Rules of the second kind follow ValidateMPIJob of operator 0.8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from horovod_train.config.kubernetes_rules import name_problems
from horovod_train.errors import ConfigError, Problem, UserError, did_you_mean

SCHEMA = Path(__file__).with_name("mpijob-v2beta1.json")
ROLES = ("Launcher", "Worker")


def check(manifest: Mapping[str, Any], source: str = "MPIJob") -> None:
    """Refuse an MPIJob that would not run.

    Raises:
        ConfigError: It lists every problem, each with the path of the field.
        UserError: jsonschema is not installed.
    """
    # The other rules rest on what the schema says of types.
    problems = list(schema_problems(manifest)) or [
        *operator_problems(manifest),
        *silent_problems(manifest),
    ]
    if problems:
        raise ConfigError(source, problems)


@cache
def strict_schema() -> dict[str, Any]:
    """Return the schema of the resource (CRD) as JSON Schema, in which unknown fields are errors."""
    schema: dict[str, Any] = _strict(json.loads(SCHEMA.read_text(encoding="utf-8")))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def _strict(node: Any) -> Any:
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
    if isinstance(strict.get("format"), str) and (found := re.fullmatch(r"int(32|64)", strict["format"])):
        largest = 2 ** (int(found[1]) - 1) - 1
        strict = {"minimum": -largest - 1, "maximum": largest, **strict}
    return strict


def schema_problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what the API server would refuse."""
    try:
        import jsonschema
    except ImportError as error:
        raise UserError(
            "checking an MPIJob needs jsonschema", hint="pip install 'horovod_train[kubernetes]'"
        ) from error
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


def operator_problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what the API server accepts, and the operator answers with an event and nothing else."""
    spec = manifest.get("spec", {})
    replicas: Mapping[str, Any] = spec.get("mpiReplicaSpecs", {})
    name = str(manifest.get("metadata", {}).get("name", ""))
    yield from name_problems("metadata.name", name, replicas.get("Worker", {}).get("replicas", 1))
    base = "spec.mpiReplicaSpecs"
    if "Launcher" not in replicas:
        yield Problem(f"{base}.Launcher", "", "is missing", did_you_mean("Launcher", replicas))
    elif replicas["Launcher"].get("replicas", 1) != 1:
        yield Problem(f"{base}.Launcher.replicas", str(replicas["Launcher"]["replicas"]), "must be 1")
    if replicas.get("Worker", {}).get("replicas", 1) < 1:
        yield Problem(f"{base}.Worker.replicas", str(replicas["Worker"]["replicas"]), "must be at least 1")
    for role in ROLES:
        policy = replicas.get(role, {}).get("restartPolicy", "Never")
        if policy not in ("Never", "OnFailure"):
            yield Problem(f"{base}.{role}.restartPolicy", repr(policy), "must be Never or OnFailure")
        if role in replicas:
            yield from _container_problems(f"{base}.{role}.template.spec", replicas[role])
    if spec.get("slotsPerWorker", 1) < 1:
        yield Problem("spec.slotsPerWorker", str(spec["slotsPerWorker"]), "must be at least 1")
    yield from _run_policy_problems(spec.get("runPolicy", {}))


def _run_policy_problems(run_policy: Mapping[str, Any]) -> Iterator[Problem]:
    if run_policy.get("cleanPodPolicy", "None") not in ("None", "Running", "All"):
        yield Problem(
            "spec.runPolicy.cleanPodPolicy",
            repr(run_policy["cleanPodPolicy"]),
            "must be None, Running or All",
        )
    for name in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        if run_policy.get(name, 0) < 0:
            yield Problem(f"spec.runPolicy.{name}", str(run_policy[name]), "must not be negative")


def _container_problems(path: str, replica: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is noticed when pods are made."""
    pod = replica.get("template", {}).get("spec", {})
    volumes = {volume.get("name") for volume in pod.get("volumes", [])}
    if not pod.get("containers"):
        yield Problem(f"{path}.containers", "", "must have at least one container")
    for number, container in enumerate(pod.get("containers", [])):
        at = f"{path}.containers.{number}"
        if not container.get("image"):
            yield Problem(f"{at}.image", "", "is missing")
        mounted = [mount.get("mountPath") for mount in container.get("volumeMounts", [])]
        for index, mount in enumerate(container.get("volumeMounts", [])):
            if mount.get("name") not in volumes:
                yield Problem(
                    f"{at}.volumeMounts.{index}.name",
                    repr(mount.get("name")),
                    "is no volume of this pod",
                    did_you_mean(str(mount.get("name")), map(str, volumes)),
                )
            if mounted.count(mount.get("mountPath")) > 1:
                yield Problem(
                    f"{at}.volumeMounts.{index}.mountPath", repr(mount["mountPath"]), "is mounted twice"
                )
        for index, port in enumerate(container.get("ports", [])):
            if not 1 <= port.get("containerPort", 0) <= 65535:
                found = str(port.get("containerPort"))
                yield Problem(f"{at}.ports.{index}.containerPort", found, "must be 1 to 65535")
        names = [port.get("name") for port in container.get("ports", []) if "name" in port]
        for name in sorted({name for name in names if names.count(name) > 1 or len(name) > 15}):
            yield Problem(f"{at}.ports", repr(name), "must be unique, and have at most 15 characters")
        yield from _resource_problems(f"{at}.resources", container.get("resources", {}))


def _resource_problems(path: str, resources: Mapping[str, Any]) -> Iterator[Problem]:
    for name, asked in resources.get("requests", {}).items():
        limit = resources.get("limits", {}).get(name)
        if limit is not None and amount(str(asked)) > amount(str(limit)):
            yield Problem(f"{path}.requests.{name}", repr(asked), f"is more than its limit {limit!r}")


def amount(quantity: str) -> float:
    """Return an amount of Kubernetes as a number.

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


def silent_problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what everybody accepts, and what then does something else than was meant."""
    spec = manifest.get("spec", {})
    if "Worker" not in spec.get("mpiReplicaSpecs", {}):
        yield Problem("spec.mpiReplicaSpecs.Worker", "", "is missing: all ranks would run in the launcher")
    for name in spec.get("mpiReplicaSpecs", {}):
        if name not in ROLES:
            yield Problem(
                f"spec.mpiReplicaSpecs.{name}", "", "must be Launcher or Worker", did_you_mean(name, ROLES)
            )
    creation = spec.get("launcherCreationPolicy", "AtStartup")
    if creation not in ("AtStartup", "WaitForWorkersReady"):
        yield Problem(
            "spec.launcherCreationPolicy", repr(creation), "must be AtStartup or WaitForWorkersReady"
        )
    managers = ("kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue")
    manager = spec.get("runPolicy", {}).get("managedBy", managers[0])
    if manager not in managers:
        yield Problem(
            "spec.runPolicy.managedBy",
            repr(manager),
            f"nobody would reconcile it; known: {', '.join(managers)}",
        )
    gang = spec.get("runPolicy", {}).get("schedulingPolicy", {})
    workers = spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas", 1)
    if gang and creation == "WaitForWorkersReady" and gang.get("minAvailable", workers + 1) > workers:
        yield Problem(
            "spec.runPolicy.schedulingPolicy.minAvailable",
            str(gang.get("minAvailable", "unset")),
            "would wait for a launcher that waits for the workers",
            f"set it to {workers}, the number of workers",
        )
