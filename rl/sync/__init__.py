"""Weight sync: from one learner to the samplers, packed, checked and attested. See `rl.sync.protocol`."""
