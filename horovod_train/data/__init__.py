"""Assignment of samples to ranks."""
