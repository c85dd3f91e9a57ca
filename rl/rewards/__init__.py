"""Rewards: how responses are scored, and the processes in which that is done."""
