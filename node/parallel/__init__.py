"""One peer of several GPUs, or of several processes on one CPU: its start as a torch.distributed
job, and the work of its ranks.
"""
