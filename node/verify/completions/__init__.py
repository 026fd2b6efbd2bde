"""Claims of completions: proving, checking and calibrating what a policy generated."""
