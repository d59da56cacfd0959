"""What brings a permuted, rescaled or rotated suspect back: groups of channels, traced and matched; LoRA factors."""
