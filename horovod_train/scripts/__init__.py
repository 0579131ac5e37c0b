"""Scripts that know nothing of this package: run unchanged, and measured from outside."""
