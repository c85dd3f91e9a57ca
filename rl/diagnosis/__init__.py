"""Where two engines disagree, and by how much."""
