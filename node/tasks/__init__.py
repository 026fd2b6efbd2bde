"""The built-in text task, and loading tasks from the user's files."""
