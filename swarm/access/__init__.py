"""Access to a swarm: links, invitations and the access policy. Imports no torch."""
