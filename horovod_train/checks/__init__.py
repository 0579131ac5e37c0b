"""Checks of hosts and of the engine. They collect facts, and report findings with a fix."""
