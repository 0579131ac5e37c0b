"""What is read on a scrape: a file for each kind of reading."""
