"""A run while it lasts: what its ranks say, signals, hosts that come and go, its end."""
