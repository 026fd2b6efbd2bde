"""The network: identity, discovery, streams, and the exchange of weights between peers.

It does not depend on training loops.
"""
