"""What the built-in text task reads: documents of files and datasets, who gets which, tokens, and batches that can be continued."""
