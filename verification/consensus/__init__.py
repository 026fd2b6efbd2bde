"""The vote on a claim: records, sortition, cases, rulings, quorum and reputation."""
