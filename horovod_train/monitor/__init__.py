"""Looking at jobs from outside, from the events of runs and the metrics of ranks; imports no framework."""
