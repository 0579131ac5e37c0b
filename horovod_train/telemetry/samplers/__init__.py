"""What is read when metrics are asked for: a file for each kind of reading."""
