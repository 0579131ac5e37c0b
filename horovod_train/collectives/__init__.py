"""What ranks do together: sums and exchanges, over Horovod or in a world of one."""
