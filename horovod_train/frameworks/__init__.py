"""Frameworks, one package each. Modules of this folder itself import no framework.

The packages have files of the same names: ``framework`` creates the objects of a job, ``task`` declares the
interface of a task, ``replica`` contains the training step, ``collectives`` the communicator, ``exchange``
the sum of lists of arrays over ranks. Other files are for one framework only, or for users' own scripts.
Modules in this folder are used by several frameworks.
"""
