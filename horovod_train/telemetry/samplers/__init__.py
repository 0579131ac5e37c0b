"""Samplers, which are called on each scrape."""
