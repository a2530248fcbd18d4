"""Collate: features in, a batch out whose masks agree with each other."""
