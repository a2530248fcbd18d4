"""Masks: what a token attends, what the numbers of a mask mean, from a mask to `Segments` and from `Segments` to a mask."""
