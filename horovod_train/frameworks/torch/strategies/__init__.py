"""How the ranks of a PyTorch job stay in step: a file per strategy."""
