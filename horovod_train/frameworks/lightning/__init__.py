"""Lightning on Horovod.

strategy.py    HorovodStrategy, for any ``Trainer``
framework.py   makes everything for a job
replica.py     a model as the rest of the product sees it
task.py        what a user brings

For a script of your own:

    from horovod_train.frameworks.lightning import HorovodStrategy

    trainer = Trainer(strategy=HorovodStrategy(), accelerator="cpu", devices=1)

or ``Trainer(strategy="horovod")`` once this package is imported.
"""

from horovod_train.frameworks.lightning.strategy import HorovodStrategy

__all__ = ["HorovodStrategy"]
