"""One file a group. Its `cases(quick)` yields one case after the other, so that large inputs do not live together."""
