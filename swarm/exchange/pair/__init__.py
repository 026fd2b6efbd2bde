"""The exchange with one partner: matchmaking, transfer and commit."""
