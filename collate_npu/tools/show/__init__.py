"""Show: a batch as a picture."""
