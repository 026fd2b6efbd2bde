"""The command line: a file for each command, or for a few that go together. Nothing imports it."""
