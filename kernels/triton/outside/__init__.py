"""What a BF16 learner computes outside its expert layers: attention, norms, rotary positions, scores of tokens."""
