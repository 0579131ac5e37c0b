"""Checks of hosts and of the engine: facts, and findings with a fix."""
