"""Formats of files with samples: the sources of ``data.source``."""
