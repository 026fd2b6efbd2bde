"""Every message that a stranger may send: fields, bounds, packing and signatures. Imports no
torch.
"""
