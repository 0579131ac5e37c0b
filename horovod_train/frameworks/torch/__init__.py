"""PyTorch on Horovod.

framework.py   makes everything for a job
framework.py     makes everything for a job
task.py          what a user brings
replica.py       the training step
collectives.py   the ranks, through Horovod
strategies/      how ranks stay in step: gradients summed while backward runs, or weights now and then
codecs/          how a bucket of gradients travels
exchange.py      lists of tensors, summed at once, for loops of others
trained.py       what an optimizer trains, and whether that is the same on all ranks
reader.py        batches from a dataset
state.py         tensors as plain arrays
"""
