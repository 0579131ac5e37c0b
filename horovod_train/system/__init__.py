"""Files, streams, processes, signals and cores of a host; nothing here knows of Horovod or of training."""
