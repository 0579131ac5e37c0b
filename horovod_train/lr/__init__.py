"""Learning-rate policies."""
