"""Reports of runs, as HTML or Markdown."""
