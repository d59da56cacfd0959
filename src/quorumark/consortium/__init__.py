"""The documents that members sign, and what each member keeps: identity, sealed files, shares, its home."""
