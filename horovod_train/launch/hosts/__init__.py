"""Hosts of a run: host lists, ssh, agents, network interfaces, secrets and staged files."""
