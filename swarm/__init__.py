"""The network: identity, discovery, streams, and the exchange of weights between peers. Knows nothing of training loops."""
