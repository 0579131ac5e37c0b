"""Run the ``horovod-train`` command as ``python -m horovod_train``."""

from horovod_train.cli.main import main

if __name__ == "__main__":
    main()
