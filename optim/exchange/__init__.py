"""The Exchange protocol, and the exchanges that need no swarm: alone, simulated, and over
torch.distributed.
"""
