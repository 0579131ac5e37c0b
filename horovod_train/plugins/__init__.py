"""Capabilities that need another environment or that few use. No module outside of this package imports them.

Their rows stand in ``registry.py``, as those of other packages stand in their entry points.
"""
