"""The preflight: whether a configuration can work, and what it will hold and move, by arithmetic alone."""
