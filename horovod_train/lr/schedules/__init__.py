"""Schedules: the rate after warm-up as a factor of the peak rate, one file per schedule.

A schedule is a function of the ``Position`` in the training and the job's ``lr`` section; one of a file
(``lr.decay: file.py:curve``) is a function of the progress since the end of warm-up, from 0 to 1.
"""
