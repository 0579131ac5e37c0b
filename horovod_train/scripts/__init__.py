"""Scripts that know nothing of this package: run as they are, and measured from outside."""
