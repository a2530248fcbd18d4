"""Audit: does a padded batch, or a flat row, give the same numbers as each sample alone?"""
