"""What is right, in plain loops over lists: slow, and with nothing of the package. Tests compare the package with it.

A row is a list `[S]` of numbers: 0 is padding, n the row's n-th sequence, whose tokens stand in order. Rows make a batch.
"""

from itertools import pairwise

IGNORED = -100


# --- what a collated batch is


def padded(values, width, fill, side):
    more = [fill] * (width - len(values))
    return [*more, *values] if side == "left" else [*values, *more]


def numbered(labels):
    """Any labels as 1, 2, ... in order of appearance; None where one comes back after another: that is no row."""
    order = list(dict.fromkeys(label for label in labels if label))
    row = [order.index(label) + 1 if label else 0 for label in labels]
    real = [n for n in row if n]
    return row if real == sorted(real) else None


def keep(rows):
    return [[n != 0 for n in row] for row in rows]


def sequences(rows):
    """`(row, places)` of each sequence, in order."""
    return [(b, [s for s, m in enumerate(row) if m == n]) for b, row in enumerate(rows) for n in sorted({*row} - {0})]


def lengths(rows):
    return [len(places) for _, places in sequences(rows)]


def side(rows):
    """Where padding stands, over all rows: "mixed" is both sides, or padding between tokens."""
    shown = keep(rows)
    if all(map(all, shown)):
        return "none"
    if all(row == sorted(row, reverse=True) for row in shown):
        return "right"
    return "left" if all(row == sorted(row) and any(row) for row in shown) else "mixed"


def positions(row):
    """A token counts those of its sequence before it; padding before all is 0, other padding counts on."""
    out = []
    for place, n in enumerate(row):
        out.append(row[:place].count(n) if n else out[-1] + 1 if any(row[:place]) else 0)
    return out


def labels(values, row):
    """Ignored: padding, and a token that follows none of its sequence. Column 0 stays: the shift of a loss drops it."""
    follows = [s == 0 or row[s - 1] == n for s, n in enumerate(row)]
    return [value if n and ok else IGNORED for value, n, ok in zip(values, row, follows)]


def alone(values, row):
    """Ignored: padding, and a token behind padding inside its sequence: such a label is refused where a row stays a row."""
    behind = [n > 0 and row[s - 1] != n and n in row[:s] for s, n in enumerate(row)]
    return [IGNORED if n == 0 or after else value for value, n, after in zip(values, row, behind)]


def offsets(counts):
    return [sum(counts[:n]) for n in range(len(counts) + 1)]


def flat(rows, values, width, fill):
    """The real tokens of all rows in one row, padding behind them."""
    return padded([x for row, xs in zip(rows, values) for n, x in zip(row, xs) if n], width, fill, "right")


# --- who attends whom


PATTERNS = {
    "causal": lambda q, k, size: k <= q,
    "sliding": lambda q, k, size: k <= q < k + size,
    "chunked": lambda q, k, size: k <= q and q // size == k // size,
    "bidirectional": lambda q, k, size: True,
    "prefix": lambda q, k, size: k <= q or k < size,
}
"""Does the query at place q of its sequence look at the key at place k of it?"""


def sees(row, q, pattern="causal", size=0):
    """For each key, True if query q attends it. Padding is seen by nobody. A query of padding looks as the sequence before
    it does, or else as the first one."""
    n = next((m for m in [*reversed(row[: q + 1]), *row] if m), 0)
    first, looks = row.index(n), PATTERNS[pattern]
    return [m == n > 0 and looks(q - first, k - first, size) for k, m in enumerate(row)]


def dense(rows, pattern="causal", size=0):
    """`[B, 1, S, S]`, True attends."""
    return [[[sees(row, q, pattern, size) for q in range(len(row))]] for row in rows]


def none_is_exact(rows, pattern="causal", size=0):
    """Does every real token see what a plain causal kernel shows it?"""
    real = [(row, q) for row in rows for q, n in enumerate(row) if n]
    return all(sees(row, q, pattern, size) == [k <= q for k in range(len(row))] for row, q in real)


# --- ranks that share a row


def share(width, size, rank, layout):
    """The places that a rank holds, in its order; zigzag: chunk `rank` from the front and from the back."""
    if size == 1 or layout != "zigzag":
        return list(range(rank * width // size, (rank + 1) * width // size))
    chunk = width // (2 * size)
    front = range(rank * chunk, (rank + 1) * chunk)
    return [*front, *(width - 1 - place for place in reversed(front))]


def share_of_documents(bounds, size, rank, layout):
    """The same in each document of a flat row."""
    documents = [(start, share(stop - start, size, rank, layout)) for start, stop in pairwise(bounds)]
    return [start + place for start, places in documents for place in places]


def gathered(shards, places):
    whole = {place: x for shard, held in zip(shards, places) for x, place in zip(shard, held)}
    return [whole[place] for place in range(len(whole))]


# --- the way back


def per_sequence(values, rows):
    return [[values[b][s] for s in places] for b, places in sequences(rows)]


def repadded(flat_values, rows, fill):
    left = iter(flat_values)
    return [[next(left) if n else fill for n in row] for row in rows]


def shifted(values, row, steps=1):
    """A token's label is that of the token `steps` on, if all between are of its sequence."""
    ends = [row[s : s + steps + 1] for s in range(len(row))]
    return [values[s + steps] if n and end == [n] * (steps + 1) else IGNORED for s, (n, end) in enumerate(zip(row, ends))]


# --- rows and batches that samples are put into


def best_fit(counts, room):
    """Samples of each row of `room` tokens: longest first, each into the row with the least room that holds it. Samples of a
    row stand as in the batch, and rows by their first sample."""
    rows = []
    for b in sorted(range(len(counts)), key=lambda b: -counts[b]):
        left = [room - sum(counts[other] for other in row) for row in rows]
        fits = [n for n, free in enumerate(left) if free >= counts[b]]
        if fits:
            rows[min(fits, key=left.__getitem__)].append(b)
        else:
            rows.append([b])
    return sorted(map(sorted, rows))


def computed(counts, options):
    """Tokens that a model computes of a batch: rows x width if they are padded, real tokens if they are packed."""
    width = options["width"]
    if options["pack"]:
        return sum(counts) if width is None else width * len(best_fit(counts, width))
    return len(counts) * (width or max(counts))


def fewest(counts, options):
    """The fewest batches within the budget: the longest samples together, for padded rows; no fewer, for packed ones."""
    room, most = options["width"] or options["max_tokens"], options["max_tokens"]
    alone, counts = [n for n in counts if n > room], sorted(n for n in counts if n <= room)
    if options["pack"]:
        held = most // room * room
        return len(alone) + (sum(counts) + held - 1) // held
    made = len(alone)
    while counts:
        made, counts = made + 1, counts[: -(most // (options["width"] or counts[-1]))]
    return made


def fills_steps(counts, ranks, options):
    """Are there so many samples that batches, none empty, fill steps? Of packed rows only where it is sure."""
    batches = len(counts) if options["pack"] else fewest(counts, options)
    return -(-batches // ranks) * ranks <= len(counts)
