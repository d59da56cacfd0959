"""Five hospitals, as a Flower app."""
