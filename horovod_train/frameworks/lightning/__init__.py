"""Lightning on Horovod.

In a script:

    from horovod_train.frameworks.lightning import HorovodStrategy

    trainer = Trainer(strategy=HorovodStrategy(), accelerator="cpu", devices=1)

or ``Trainer(strategy="horovod")``, after this package has been imported.
"""

from horovod_train.frameworks.lightning.strategy import HorovodStrategy

__all__ = ["HorovodStrategy"]
