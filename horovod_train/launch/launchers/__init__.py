"""A file per launcher: what its command, batch script or manifest looks like."""
