"""Speed beside the real, installed peers and beside floors: `nox -s bench`, or `python -m benchmarks --help`.

One run, one thread, contestants interleaved, outputs compared before anything is timed. Each group of cases is one file
of `groups`. A missed target is printed and kept; times never fail a run, a wrong output does.
"""
