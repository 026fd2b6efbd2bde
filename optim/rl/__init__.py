"""Reinforcement learning from shared rollouts (SAPO): the selection of rollouts, and the losses."""
