"""Callbacks for other people's training loops; each file needs its library, and nothing else here does."""
