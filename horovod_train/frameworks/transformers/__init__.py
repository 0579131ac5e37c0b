"""Hugging Face Transformers on Horovod.

trainer.py     HorovodTrainerMixin and HorovodTrainer, for any script with a ``Trainer``
framework.py   makes everything for a job
replica.py     a model as the rest of the product sees it
task.py        what a user brings

For a script of your own:

    from horovod_train.frameworks.transformers import HorovodTrainer, init

    init()                                 # first: before TrainingArguments
    trainer = HorovodTrainer(model=model, args=TrainingArguments(...), train_dataset=data)
    trainer.train()
"""

from horovod_train.frameworks.transformers.trainer import HorovodTrainer, HorovodTrainerMixin, init

__all__ = ["HorovodTrainer", "HorovodTrainerMixin", "init"]
