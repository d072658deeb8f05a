"""The engines that a benchmark compares, each in its own process."""
