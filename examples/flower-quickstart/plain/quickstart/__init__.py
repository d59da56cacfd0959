"""A quickstart app, as users have it."""
