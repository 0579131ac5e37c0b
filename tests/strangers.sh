#!/usr/bin/env bash
# Installs and trains as a stranger does: with PyPI's own PyTorch, which has CUDA, and no GPU. Called by
# `make strangers`, as root in a mount namespace of its own, so that CUDA of this machine can be hidden.
#
#   strangers.sh FOLDER PYTHON...
#
# Each Python meets four machines: without CUDA, with a whole toolkit, with an nvcc that is a script (environment
# modules, ccache and Debian have one), and with a toolkit that has no headers.
set -euo pipefail
folder=$1
shift

for home in /usr/local/cuda*; do
  [ ! -d "$home" ] || [ -L "$home" ] || mount -t tmpfs none "$home"
done
IFS=: read -ra folders <<< "$PATH"
for each in "${folders[@]}"; do
  [ ! -x "$each/nvcc" ] || mount --bind /dev/null "$each/nvcc"  # nothing that can be executed
done
unset CUDA_HOME HOROVOD_CUDA_HOME HOROVOD_NCCL_HOME
path=$PATH

# A toolkit from PyPI, laid out as the installers of NVIDIA do.
toolkit() {
  [ -d "$folder/toolkit" ] && return
  "$1" -m pip install -q --disable-pip-version-check --target "$folder/wheels" 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'
  "$1" - "$folder" <<'PYTHON'
import sys
from pathlib import Path
from horovod_train.horovod.cuda import Toolkit, as_toolkit
folder = Path(sys.argv[1])
as_toolkit(Toolkit(folder / "wheels" / "nvidia" / "cu13", "13.0"), folder / "toolkit")
PYTHON
  mkdir "$folder/script"
  printf '#!/bin/sh\nexec %s/toolkit/bin/nvcc "$@"\n' "$folder" > "$folder/script/nvcc"
  chmod +x "$folder/script/nvcc"
  cp -a "$folder/toolkit" "$folder/headless"
  rm "$folder/headless/include"
}

machine() {  # PYTHON KIND EXPECTED_CUDA
  local name="$1, $2" bin=$folder/$1/bin
  rm -f "$folder/$1/engine"
  XDG_CACHE_HOME=$folder/cache-$1-$2 make -s train PYTHON="$1" VENV="$folder/$1" TORCH='torch===2.13.0' \
    > "$folder/$1-$2.log" 2>&1 || { tail -n 40 "$folder/$1-$2.log"; echo "error: make train fails with $name"; exit 1; }
  "$bin/horovod-train" engine check > "$folder/check.log" || { cat "$folder/check.log"; exit 1; }
  built=$("$bin/python" -c 'from horovod_train.horovod.mpi import installed_plan; print(installed_plan()["cuda"])')
  [ "$built" = "$3" ] || { echo "error: with $name the engine has CUDA '$built', expected '$3'"; exit 1; }
  # Without a log kept the line is only in the output: a build for CPUs says why.
  [ -n "$3" ] || grep -q 'for CPUs alone, as this machine has no GPU and' "$folder/$1-$2.log" || {
    echo "error: with $name the build does not say that it is for CPUs"; exit 1; }
  (cd "$folder" && "$bin/horovod-train" run digits -n 2 --set name="$1-$2" --set train.epochs=1 > "$folder/run.log" 2>&1) ||
    { cat "$folder/run.log"; echo "error: run fails with $name"; exit 1; }
  echo "$name: trains, in $SECONDS s so far"
}

mkdir -p "$folder"
for python in "$@"; do
  "$python" -c "" 2> /dev/null || { echo "$python: not installed here, left out"; continue; }
  SECONDS=0
  PATH=$path machine "$python" bare ''
  toolkit "$folder/$python/bin/python"
  PATH=$folder/toolkit/bin:$path machine "$python" toolkit 13.0
  PATH=$folder/script:$path machine "$python" script 13.0
  PATH=$folder/headless/bin:$path machine "$python" headless ''
  rm -rf "${folder:?}/$python" "$folder"/cache-*
done
