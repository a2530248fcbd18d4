"""Consumers: who reads a batch, in which form, and the adapter that hands it over."""
