"""Horovod itself: built with the patches it needs, checked, told what to do by its environment."""
