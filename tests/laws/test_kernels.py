"""The arguments of kernels against the oracle: which offsets a recurrent kernel is told, which scores attention computes.

Legend: B rows, S width, T tokens of the flat row.
"""

import oracle
import strategies as make
import torch
from laws.compared import apart, refused, taken
from strategies import law

from collate_npu import Segments
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs

KERNELS = (
    "transformers", "fla", "fla_conv", "fla_cp", "causal_conv1d", "fla_npu", "fla_npu_cumsum", "fla_npu_flash",
    "fla_npu_conv", "fla_npu_recurrent", "torch_npu", "megatron",
)  # fmt: skip
MOST_DECODED = 8


def has_holes(rows) -> bool:
    return any(places[-1] - places[0] >= len(places) for _, places in oracle.sequences(rows))


def taken_up(rows, kernel):
    """What each sequence of the call takes up: one row stays as it is, of several the padding is out; None: refused."""
    if len(rows) > 1 or oracle.side(rows) == "none":
        return oracle.lengths(rows)
    (row,) = rows
    if has_holes(rows) or (kernel == "megatron" and not row[0]):
        return None
    if kernel != "megatron":
        return oracle.runs(row)
    starts = [places[0] for _, places in oracle.sequences(rows)]  # its padding lies behind the sequence before
    return [stop - start for start, stop in zip(starts, [*starts[1:], len(row)])]


@law
def test_what_a_recurrent_kernel_is_told(drawn):
    rows, kernel = make.rows_of(drawn), drawn.pick(KERNELS)
    if drawn.below(4) == 3:  # long ones have several chunks
        rows = [[n for n in row for _ in range(20)] for row in rows]
    packed = max(map(max, rows)) > 1
    padded = kernel == "transformers" and (len(rows) > 1 or (not packed and oracle.side(rows) != "none"))
    counts = (None if packed or has_holes(rows) else []) if padded else taken_up(rows, kernel)
    must = counts is None or (kernel == "fla_npu_recurrent" and max(counts) > MOST_DECODED)
    segments = Segments(rows)
    told = taken(lambda: gated_delta_kwargs(segments, kernel=kernel), must, "no argument says it")
    if told is None:
        return
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in told.items()}
    assert plain == ({"attention_mask": oracle.keep(rows)} if padded else spelled(kernel, counts))
    assert apart([segments.array], told)


def spelled(kernel, counts):
    """The arguments of each kernel as its own documentation has them."""
    ends = oracle.offsets(counts)
    numbers = [[n for n, count in enumerate(counts) for _ in range(count)]]
    table = [x for pair in oracle.chunks(counts, 64) for x in pair]
    fla = {"cu_seqlens": ends, "cu_seqlens_cpu": ends}
    four = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {
        "transformers": {"cu_seq_lens_q": ends, "seq_idx": numbers},
        "fla": fla,
        "fla_conv": fla,
        "fla_cp": {"cu_seqlens": ends},
        "causal_conv1d": {"seq_idx": numbers},
        "fla_npu": {"cu_seqlens": tuple(ends), "chunk_indices": tuple(table)},
        "fla_npu_cumsum": {
            "cu_seqlens": tuple(ends),
            "chunk_indices_out": tuple(x for n in range(len(counts)) for x in (n, 0)),
        },
        "fla_npu_flash": {"cu_seqlens": ends, "cu_seqlens_list": ends},
        "fla_npu_conv": {"query_start_loc": tuple(ends)},
        "fla_npu_recurrent": {"actual_seq_lengths": [0, *counts]},
        "torch_npu": {"actual_seq_lengths": counts},
        "megatron": {
            **dict.fromkeys(four, ends),
            "qkv_format": "thd",
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(counts)),
            "total_tokens": ends[-1],
        },
    }[kernel]


@law
def test_what_the_operator_computes_of_its_arguments(drawn):
    """What the operator would compute with these arguments is what every real token should see."""
    rows, (name, size, pattern), tnd = make.rows_of(drawn, width=8), make.pattern_of(drawn), drawn.chance()
    layout = "TND" if tnd else "BSND"
    told = refused(lambda: fusion_attention_kwargs(Segments(rows), pattern=pattern, layout=layout), False, "")
    if told is None:
        assert (tnd, name, has_holes(rows)) == (True, "sliding", True), "refused"
        return
    mode, given = told.get("sparse_mode", 0), told.get("atten_mask")
    before = told.get("pre_tockens", 1 << 31)
    assert mode in range(7)
    first = told.get("prefix")
    assert (mode in (5, 6)) == (first is not None)
    assert told.get("next_tockens", 0) == 0 or given is None
    small = None if given is None or given.ndim == 2 else given.tolist()
    assert given is None or given.ndim == 4 or (mode > 1 and given[:9, :9].tolist() == LATER)

    def computed(b, q, k, n):
        """Queries and keys counted in the row of the tensor, or in sequence n of a packed one."""
        if small is not None and mode in (0, 1, 5):
            causal = k <= q <= k + before if mode == 0 else mode == 1 or k <= q or k < first[n]
            return not small[b % len(small)][0][q][k] and causal
        return given is None or (k <= q and (mode != 4 or q <= k + before)) or (mode == 6 and k < first[n])

    if not tnd:
        wrong = [
            (b, q, k)
            for b, row in enumerate(rows)
            for q, n in enumerate(row)
            for k in range(len(row))
            if n and computed(b, q, k, b) != oracle.attends(row, q, k, name, size)
        ]
        assert not wrong, (told, wrong)
        return
    where = [(b, s) for b, places in oracle.sequences(rows) for s in places]
    ends, owners = told["actual_seq_qlen"], []
    for n, (start, stop) in enumerate(zip([0, *ends], ends)):
        owners += [(n, t - start) for t in range(start, stop)]
    assert ends == told["actual_seq_kvlen"]
    assert len(owners) == len(where)
    for (b, q), (n, i) in zip(where, owners):
        for (other, k), (m, j) in zip(where, owners):
            right = b == other and oracle.attends(rows[b], q, k, name, size)
            assert (n == m and computed(0, i, j, n)) == right, (told, b, q, k)


LATER = [[k > q for k in range(9)] for q in range(9)]
"""The corner of the compressed triangle: True above the diagonal."""
