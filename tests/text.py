"""Samples of the text that ships with the package, as tests take them."""

from collate_npu.tools.files import samples_of_rows, shipped_text


def sample_ids(tokenizer, **drawing):
    """Token ids of samples drawn from it."""
    return [feature["input_ids"] for feature in samples_of_rows(shipped_text(), tokenizer, **drawing)]
