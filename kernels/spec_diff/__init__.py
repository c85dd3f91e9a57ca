"""What a difference between two execution specs moves: `python -m kernels.spec_diff`."""
