"""``shoal plan``: what each method and codec would cost on a link, and the settings to copy."""
