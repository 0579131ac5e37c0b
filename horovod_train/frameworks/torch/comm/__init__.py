"""Communication between the ranks of a PyTorch job."""
