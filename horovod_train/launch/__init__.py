"""The control side: plans that start ranks, and carrying them out."""
