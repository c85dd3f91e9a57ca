"""Benchmarks: what is asked, how it is scored, and how sure the result is."""
