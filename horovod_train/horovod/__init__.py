"""Build, installation and configuration of Horovod (the engine)."""
