"""``python -m horovod_train`` is ``horovod-train``."""

from horovod_train.cli.main import main

if __name__ == "__main__":
    main()
