"""Models as they come: layouts, tensors, files, suspects, and the canonical form that every statistic reads."""
