"""Is this model ours? What a quorum does with a suspect model."""
