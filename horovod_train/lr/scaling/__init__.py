"""Scaling rules: how the learning rate and related settings follow the global batch, one file per rule.

A rule is a function of ``k`` = global batch / reference batch, and returns a ``Scaled``. A rule of another
package (entry point ``horovod_train.scalings``) or of a file (``lr.scaling: file.py:rule``) may return the
factor of the rate alone.
"""
