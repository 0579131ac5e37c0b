"""How gradients travel between the ranks of a PyTorch job: a file per codec."""
