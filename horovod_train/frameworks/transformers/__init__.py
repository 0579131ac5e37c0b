"""Hugging Face Transformers on Horovod.

In a script:

    from horovod_train.frameworks.transformers import HorovodTrainer, init

    init()                                 # first: before TrainingArguments
    trainer = HorovodTrainer(model=model, args=TrainingArguments(...), train_dataset=data)
    trainer.train()
"""

from horovod_train.frameworks.transformers.trainer import HorovodTrainer, HorovodTrainerMixin, init

__all__ = ["HorovodTrainer", "HorovodTrainerMixin", "init"]
