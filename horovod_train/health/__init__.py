"""What is checked while training."""
