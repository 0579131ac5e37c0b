"""Events of a run: their types, their format between programs, and their text for the user."""
