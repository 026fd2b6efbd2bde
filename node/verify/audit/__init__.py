"""Parts that checks of all kinds of claims share: errors, findings, budget, snapshots and transport."""
