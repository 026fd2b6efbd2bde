"""Callbacks for the trainers of other libraries; only the file of a library needs it."""
