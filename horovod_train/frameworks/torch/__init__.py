"""PyTorch on Horovod.

framework.py   makes everything for a job
world.py       the ranks, through Horovod
reducer.py     gradients, summed over ranks while backward still runs
replica.py     the training step
reader.py      batches from a dataset
task.py        what a user brings
state.py       tensors as plain arrays
"""
