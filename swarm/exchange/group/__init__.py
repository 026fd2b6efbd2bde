"""The exchange in a group: leader, members, roster, all-reduce or all-gather, and commit."""
