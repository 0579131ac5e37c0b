"""Supervision of a run: output and events of ranks, signals, available hosts, outcome."""
