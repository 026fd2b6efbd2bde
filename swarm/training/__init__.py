"""What a training loop uses: a session, the optimizer made from settings, and its synchronisation."""
