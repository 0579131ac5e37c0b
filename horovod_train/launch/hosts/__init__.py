"""Machines that carry ranks: how they are named, reached, compared, and told what to do."""
