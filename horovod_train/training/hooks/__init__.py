"""What happens around the loop, a file for each subject."""
