"""Data of the built-in text task: documents of files and datasets, their shards, tokens, and
resumable batches.
"""
