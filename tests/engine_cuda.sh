#!/usr/bin/env bash
# Builds the engine for GPUs in an environment, checks it, and looks at what it is linked with.
# Called by `make engine-cuda`, in a mount namespace of its own where it can be: CUDA of the system is hidden.
set -euo pipefail
bin=$1

if [ "$(readlink /proc/self/ns/mnt)" != "$(readlink "/proc/$PPID/ns/mnt")" ]; then
  for folder in /usr/local/cuda*; do
    [ ! -d "$folder" ] || [ -L "$folder" ] || mount -t tmpfs none "$folder"
  done
fi

"$bin/horovod-train" engine build --force
"$bin/horovod-train" engine check
library=$("$bin/python" -c 'import horovod.torch.mpi_lib_v2 as library; print(library.__file__)')
missing=$(ldd "$library" | grep "not found" || true)
[ -z "$missing" ] || { echo "error: $library lacks $missing"; exit 1; }
ldd "$library" | grep -E 'libnccl|libcudart|libmpi\.' | sed 's/ (0x.*//'
"$bin/python" tests/gpu/without_one.py
