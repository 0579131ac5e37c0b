"""Interface of frameworks, what several frameworks use, and the framework PyTorch.

    base           interface between the training loop and a framework, and tasks
    reader         batches as NumPy arrays
    exchange       sums of lists of gradients over ranks
    devices        GPUs of ranks, and initialization of Horovod
    plain_data     arrays and values as plain data, for checkpoints and comparisons
    python_state   what training changes besides weights, buffers and the optimizer
    callbacks      callbacks of a task in the training loop of Keras, Lightning or Transformers
    torch          PyTorch

Modules of this folder itself import no framework. The other frameworks are packages of
``horovod_train.plugins``. In each package, ``framework`` creates the objects of a job.
"""
