"""The pace of bulk, and how long a transfer may take, by what the link was measured to carry."""
