"""Tasks that ship with the package."""
