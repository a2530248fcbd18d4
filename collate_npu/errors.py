"""Errors that a user can meet. Each says: key and row, what arrived, the rule, the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized
from difflib import get_close_matches

_HARMLESS = "\n\t\xa0\u3000\u200d"
"""Newline, tab, the spaces of other scripts, and the joiner inside an emoji."""


class CollateError(ValueError):
    """A batch, a mask or an option is wrong, or can be read in two ways; the library does not guess.

    >>> from collate_npu import PaddingCollator
    >>> PaddingCollator(pad_token_id=0)([{"input_ids": [1, 2], "labels": [1]}])
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: labels: 1 bad row.
      row 0: got 1 values beside 2 input_ids
    labels has one value for each token of its row.
    Cut or build both together, before collation.
    """


class PolarityError(CollateError):
    """True may mean "attends" or "blocked", and the mask does not show which.

    >>> from collate_npu import derive_segments
    >>> derive_segments([[[[True, True, False]]]])
    Traceback (most recent call last):
        ...
    collate_npu.errors.PolarityError: attention_mask: got bool [1, 1, 1, 3]. True is 'attends' (SDPA) or 'blocked'
        (TransformerEngine's padding mask), and a key mask shows neither. Pass polarity='keep' (True attends), 'masked'
        (True is blocked) or 'bias' (additive).
    More: collate-npu guide errors#polarity
    """


class AmbiguousMaskError(CollateError):
    """Two paddings, or two packings, give exactly this mask.

    >>> from collate_npu import BatchAdapter
    >>> BatchAdapter(needs_mask_2d=True, consumer="megatron")({"input_ids": [[1, 2, 0]]})
    Traceback (most recent call last):
        ...
    collate_npu.errors.AmbiguousMaskError: batch: got keys input_ids. No key says which tokens are padding: no mask may
        mean no padding, or a mask that was lost. Pass attention_mask [B, S], 1 = real token (ones
        where nothing is padded), and segment_ids if rows are packed; or collate with PaddingCollator.
    More: collate-npu guide errors#padding-unknown
    """


class UnsupportedFormError(CollateError):
    """The model, or the kernel, can compute this batch correctly from no mask that it reads.

    >>> from collate_npu import BatchAdapter, Segments
    >>> BatchAdapter(needs_mask_2d=True, consumer="verl_npu").choose(Segments.from_lengths([3, 5], side="left"))
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: attention_mask: got Segments(B=2, S=5, lengths=[3, 5], padding='left').
        MindSpeed's flash kernel runs a compressed causal triangle, and here padding stands on the left, so real tokens
        would attend it. With plain causal attention: pad right with one sequence a row, or use padding_free=True.
        MindSpeed 0.14 to 0.16 with one rank a row reads a dense mask under attention_mask_type=general
        (consumer='mindspeed_dense').
    More: collate-npu guide errors#causal-kernel
    """


LONGEST = 8192
"""The most characters of one fact of a message; what arrived may be of any size."""


def explain(where: str, got: str, rule: str, remedy: str, *, more: str = "") -> str:
    """Return a message of four facts: where, what arrived, the rule, the remedy.

    `more` is a section of the guide's page `errors`; the message names it on a line of its own."""
    return f"{short(where)}: got {short(got)}. {short(rule)} {short(remedy)}{_pointer(more)}"


def explain_rows(key: str, rows: Iterable[tuple[int, str]], rule: str, remedy: str, more: str = "") -> str:
    """Return a message as `explain` does, for all bad rows of one key."""
    listed = sorted(rows)
    head = f"{short(key)}: {len(listed)} bad row{'s' if len(listed) != 1 else ''}."
    lines = [head, *(f"  row {row}: got {short(got)}" for row, got in listed), short(rule), short(remedy)]
    return "\n".join(lines) + _pointer(more)


def refuse_rows(
    key: str,
    bad: Collection[tuple[int, str]],
    rule: str,
    remedy: str,
    *,
    more: str = "",
    kind: type[CollateError] = CollateError,
) -> None:
    """Raise an error for all bad rows of one key, worded by `explain_rows`, if there are any."""
    if bad:
        raise kind(explain_rows(key, bad, rule, remedy, more))


def short(text: str, most: int = LONGEST) -> str:
    """Return a text that a terminal can show; only the beginning and the end of one longer than `most`."""
    if len(text := str(text)) > most:
        text = f"{text[: most // 2]} ... {len(text)} characters ... {text[-most // 4 :]}"
    return printable(text)


def _pointer(section: str) -> str:
    return f"\nMore: collate-npu guide errors#{section}" if section else ""


def did_you_mean(names: str | list[str], known: Iterable[str], otherwise: str = "") -> str:
    """Return "Did you mean ...?" with the known names nearest to these, or `otherwise` if none is near."""
    held = {name.casefold(): name for name in known}
    typed = [name.casefold() for name in ([names] if isinstance(names, str) else names) if name]
    parts = {each: [x for x in held if x.startswith(each) or each.endswith(f"_{x}")] for each in typed}
    near = [held[x] for each in typed for x in get_close_matches(each, held, 2) or parts[each]]
    return f"Did you mean {' or '.join(dict.fromkeys(near))}?" if near else otherwise


def not_one_of(where: str, value: object, known: Iterable[object], remedy: str = "Name one of them.") -> CollateError:
    """Return the error for a value that is none of the known names; it names the nearest of them."""
    names = [*map(str, known)]
    near = did_you_mean(str(value), names, remedy)
    return CollateError(explain(where, repr(value)[:60], f"It is one of {', '.join(names)}.", near))


def a_type(value: object) -> str:
    """Return the type of a value with its article: `an int`."""
    name = (value if isinstance(value, type) else type(value)).__name__
    return f"a{'n' * (name[0] in 'AEIOaeio')} {name}"


def shape_of(tensor: object) -> str:
    """Return the type and shape of a tensor as a message writes them: `int64 [2, 8]`."""
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    try:
        if not hasattr(tensor, "shape"):
            return f"{dtype} of {len(tensor)}" if isinstance(tensor, Sized) else dtype
        return f"{dtype} {list(tensor.shape)}"
    except (RuntimeError, TypeError):  # a strided nested tensor has no shape; a stranger's may be anything
        return f"{dtype} of no shape"


def printable(text: str) -> str:
    """Return the text with every control character, and every invisible one, written as its escape."""
    return "".join(c if c.isprintable() or c in _HARMLESS else c.encode("unicode_escape").decode() for c in text)
