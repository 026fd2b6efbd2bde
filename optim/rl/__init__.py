"""Reinforcement learning from shared rollouts (SAPO): which rollouts to learn from, and the losses."""
