"""One package per framework: the only places that import them.

Files have the same names in all of them: ``framework`` makes everything for a job, ``task`` is what a user
brings, ``replica`` the training step, ``collectives`` the ranks, ``exchange`` the sum of lists of tensors
over them. Next to these lie what is the framework's own, and what it adds to a script of a user's own. What
several of them need lies here.
"""
