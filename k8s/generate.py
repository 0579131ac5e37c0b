"""Write manifests for Kustomize: what `horovod-train render` says of each job.yaml here.

    base/                the manifests of base/job.yaml
    monitoring/          Grafana's dashboards as ConfigMaps, Prometheus' rules, and what tells of jobs
    overlays/<name>/     what is different, or new, in those of overlays/<name>/job.yaml

usage: python k8s/generate.py [--runbook URL]     after a change of a job.yaml, or of the renderer;
                                                  URL is your copy of docs/runbook.md, to which alerts link
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_train.config.load import load_job
from horovod_train.launch.submit import resolve
from horovod_train.plugins.dashboards import dashboards, rules
from horovod_train.plugins.kubernetes.render import Manifest, as_yaml, render

FOLDER = Path(__file__).parent
OVERLAYS = ("cpu", "elastic", "gpu", "monitoring", "spot")
RUN_ID = "first"
MONITORING = "monitoring"  # the namespace of Prometheus and Grafana
IMAGE = "registry.example/horovod_train"


def manifests_of(job_file: Path) -> list[Manifest]:
    """Return the manifests of a job."""
    return render(resolve(load_job(job_file, environ={})).job, RUN_ID)


def file_name(manifest: Manifest) -> str:
    """Return the file that a manifest stands in."""
    return f"{manifest['kind'].lower()}.yaml"


def difference(before: Any, after: Any) -> Any:
    """Return the merge patch (RFC 7386) that makes one mapping the other."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif isinstance(value, Mapping) and isinstance(before[key], Mapping):
            if inner := difference(before[key], value):
                patch[key] = inner
        elif value != before[key]:
            patch[key] = value
    return patch


def kustomization(resources: Sequence[str], patches: Sequence[str]) -> str:
    """Return a kustomization.yaml."""
    document: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
    }
    if patches:
        document["patches"] = [{"path": path} for path in patches]
    return as_yaml([document])


def generated(runbook: str = rules.RUNBOOK) -> dict[Path, str]:
    """Return all files, by path below this folder."""
    base = manifests_of(FOLDER / "base" / "job.yaml")
    files = {Path("base") / file_name(manifest): as_yaml([manifest]) for manifest in base}
    files[Path("base/kustomization.yaml")] = kustomization([file_name(manifest) for manifest in base], [])
    for name in OVERLAYS:
        files |= overlay(Path("overlays") / name, base)
    return files | monitoring(runbook)


def monitoring(runbook: str) -> dict[Path, str]:
    """Return what a cluster needs once, for all jobs."""
    folder = Path("monitoring")
    files = {
        folder / "rules.yaml": as_yaml([prometheus_rule(runbook)]),
        folder / "targets.yaml": as_yaml(targets()),
    }
    for name, text in dashboards().items():
        files[folder / f"{name.removesuffix('.json')}.yaml"] = as_yaml([config_map(name, text)])
    files[folder / "kustomization.yaml"] = kustomization(sorted(path.name for path in files), [])
    return files


def config_map(name: str, text: str) -> Manifest:
    """Return a dashboard as Grafana's sidecar finds it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name.removesuffix(".json"),
            "namespace": MONITORING,
            "labels": {"grafana_dashboard": "1"},
        },
        "data": {name: text},
    }


def prometheus_rule(runbook: str) -> Manifest:
    """Return the rules as Prometheus' operator takes them."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "horovod-train", "namespace": MONITORING},
        "spec": rules.document(runbook),
    }


def targets() -> list[Manifest]:
    """Return what tells Prometheus of jobs that have ended: `targets serve` on the volume of their runs."""
    labels = {"app.kubernetes.io/name": "horovod-train-targets"}
    container = {
        "name": "targets",
        "image": IMAGE,
        "command": ["horovod-train", "targets", "serve", "/data/runs", "--host", "0.0.0.0"],  # noqa: S104
        "ports": [{"name": "metrics", "containerPort": 9300}],
        "readinessProbe": {"tcpSocket": {"port": 9300}},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "training", "readOnly": True}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "horovod-train-targets", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "horovod-train-targets", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "30s"}],
        },
    }
    return [deployment, monitor]


def overlay(folder: Path, base: Sequence[Manifest]) -> dict[Path, str]:
    """Return the files of one overlay."""
    known = {manifest["kind"]: manifest for manifest in base}
    files, resources, patches = {}, ["../../base"], []
    for manifest in manifests_of(FOLDER / folder / "job.yaml"):
        path = file_name(manifest)
        content: Manifest = manifest
        if manifest["kind"] not in known:
            resources.append(path)
        elif changes := difference(known[manifest["kind"]], manifest):
            patches.append(path)
            which = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
            metadata = {"metadata": {"name": manifest["metadata"]["name"], **changes.pop("metadata", {})}}
            content = {**which, **metadata, **changes}
        else:
            continue
        files[folder / path] = as_yaml([content])
    files[folder / "kustomization.yaml"] = kustomization(resources, patches)
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runbook", metavar="URL", default=rules.RUNBOOK)
    runbook = parser.parse_args().runbook
    for old in [*FOLDER.glob("*/*.yaml"), *FOLDER.glob("overlays/*/*.yaml")]:
        if old.name != "job.yaml":
            old.unlink()
    (FOLDER / "monitoring").mkdir(exist_ok=True)
    for path, text in generated(runbook).items():
        (FOLDER / path).write_text(text, encoding="utf-8")
