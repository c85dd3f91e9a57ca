"""Execution specifications for mixture-of-experts layers, and what runs them."""
