"""Communicators of the ranks of a job, over Horovod or for a single process."""
