"""Files, streams, processes, signals and cores of a host, independent of Horovod and of training."""
