"""Checkpoints: storing, writing in the background, exporting, merging and downloading."""
