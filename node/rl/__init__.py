"""Reinforcement learning from own and foreign rollouts: environments, policies, and the task that
brings them together.
"""
