"""Who may come in: links, invitations and the access policy. Imports no torch."""
