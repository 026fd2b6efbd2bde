"""Inner optimizers made for a model: Muon for its hidden matrices, AdamW for the rest."""
