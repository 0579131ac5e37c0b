"""Studies: the same job on several numbers of ranks, with several scaling rules and seeds, as a table."""
