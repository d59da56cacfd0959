"""For researchers: known keys, attacks, the lab, benchmarks. Nothing that members use in earnest imports it."""
