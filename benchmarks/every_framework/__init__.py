"""One network in every framework: as a task of ours, and in a loop written by hand on Horovod."""
