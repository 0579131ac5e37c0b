"""TensorFlow on Horovod.

framework.py   makes everything for a job
world.py       the ranks, through Horovod
reducer.py     gradients, summed over ranks inside the graph
replica.py     the training step
task.py        what a user brings
"""
