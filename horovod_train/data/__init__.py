"""Who reads which sample."""
