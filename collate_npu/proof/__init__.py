"""Proof: what every layer received, and the numbers of a batch against those of each sample alone."""
