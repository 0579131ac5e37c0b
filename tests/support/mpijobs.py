"""Jobs as MPIJobs: descriptions, and what each was rendered to (tests/data/mpijobs).

usage: python tests/support/mpijobs.py     writes the files anew; look at the difference
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.launch.submit import resolve
from horovod_train.plugins.kubernetes.render import as_yaml, merge, render

FOLDER = Path(__file__).parents[1] / "data" / "mpijobs"
RUN_ID = "20261122-120000-0000"
BASE: dict[str, Any] = {
    "name": "digits",
    "task": "digits",
    "run_dir": "/data/runs",
    "launch": {
        "launcher": "mpijob",
        "num_ranks": 2,
        "kubernetes": {
            "image": "registry.example/horovod_train:0.1.0",
            "volumes": [{"mount_path": "/data", "claim": "training"}],
        },
    },
}
JOBS: dict[str, dict[str, Any]] = {
    "cpu": {"launch": {"kubernetes": {"cpus_per_rank": "2", "memory_per_rank": "4Gi"}}},
    "gpu": {
        "launch": {
            "num_ranks": 16,
            "kubernetes": {
                "ranks_per_worker": 8,
                "gpus_per_rank": 1,
                "cpus_per_rank": "12",
                "memory_per_rank": "64Gi",
                "shm_size": "32Gi",
                "image_pull_secrets": ["registry"],
            },
        }
    },
    "rdma": {
        "launch": {
            "num_ranks": 16,
            "env": {"NCCL_IB_HCA": "mlx5"},
            "kubernetes": {
                "ranks_per_worker": 8,
                "gpus_per_rank": 1,
                "extra_resources": {"rdma/hca": 1},
                "host_network": True,
                "ssh_port": 2322,
            },
        }
    },
    "spot": {
        "launch": {
            "num_ranks": 4,
            "grace_s": 45.0,
            "kubernetes": {
                "spot": True,
                "tolerations": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
                "node_selector": {"pool": "spot"},
                "topology_spread": "topology.kubernetes.io/zone",
                "backoff_limit": 20,
            },
        }
    },
    "elastic": {
        "launch": {
            "num_ranks": 4,
            "elastic": {"min_ranks": 2, "max_ranks": 20, "cooldown_s": 30.0},
            "kubernetes": {"ranks_per_worker": 2, "gang": "scheduler-plugins"},
        }
    },
    "kueue": {"launch": {"kubernetes": {"queue": "team-a", "suspend": True, "priority_class": "low"}}},
    "volcano": {
        "launch": {
            "num_ranks": 8,
            "kubernetes": {"gang": "volcano", "gang_queue": "research", "gang_timeout_s": 600},
        }
    },
    "secrets": {
        "launch": {
            "secrets": {"WANDB_API_KEY": "kubernetes:tracking/api-key"},
            "kubernetes": {"labels": {"team": "vision"}, "annotations": {"owner": "vision@example.org"}},
        }
    },
    "monitoring": {
        "launch": {"num_ranks": 4, "kubernetes": {"ranks_per_worker": 2, "pod_monitor": True}},
        "metrics": {"port": 9500},
    },
    "bucket": {
        "run_dir": "/bucket/runs",
        "launch": {
            "kubernetes": {
                "volumes": [
                    {
                        "mount_path": "/bucket",
                        "csi_driver": "gcsfuse.csi.storage.gke.io",
                        "csi_attributes": {"bucketName": "training-runs"},
                    },
                    {"mount_path": "/scratch", "empty_dir": True},
                    {"mount_path": "/dataset", "claim": "dataset", "read_only": True},
                ]
            }
        },
    },
    "patched": {
        "launch": {
            "kubernetes": {
                "deadline_s": 86400,
                "keep_finished_s": None,
                "network_policy": False,
                "patch": {
                    "spec": {
                        "mpiReplicaSpecs": {
                            "Worker": {"template": {"spec": {"runtimeClassName": "gvisor"}}},
                        }
                    }
                },
            }
        },
        "metrics": {"enabled": False},
    },
}


def described(name: str, **changes: Any) -> dict[str, Any]:
    """Return a job description; with further changes."""
    found: dict[str, Any] = merge(merge(BASE, JOBS.get(name, {})), changes)
    if JOBS.get(name, {}).get("launch", {}).get("kubernetes", {}).get("keep_finished_s", 0) is None:
        found["launch"]["kubernetes"]["keep_finished_s"] = None
    return found


def manifests(name: str) -> list[dict[str, Any]]:
    """Return what a job is rendered to now."""
    request = resolve(Job.model_validate(described(name)), RUN_ID)
    return render(request.job, request.run_id)


def text(name: str) -> str:
    """Return the same as a file."""
    return as_yaml(manifests(name))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for job in JOBS:
        (FOLDER / f"{job}.yaml").write_text(text(job))
