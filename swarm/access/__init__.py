"""Who may be a member: links, invitations, and the access policy of a node."""
