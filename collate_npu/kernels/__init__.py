"""Kernels: arguments from `Segments`, checked before a card sees them, and a CPU reference of each."""
