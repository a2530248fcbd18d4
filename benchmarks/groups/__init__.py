"""One file a group. Each has `cases(quick)`, which yields its cases one by one, so that large inputs do not live together."""
