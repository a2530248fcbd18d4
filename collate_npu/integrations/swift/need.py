"""Need: the trainer of ms-swift's transformers backend, built in Python, for `collate-npu need`.

`swift sft` builds the same; it takes `--padding_free true` with flash attention alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from collate_npu.consumers.labels_and_positions import IGNORED
from collate_npu.integrations.adapt import adapt
from collate_npu.integrations.swift import PACKAGE as PACKAGE


def _trainer(model: Any, tokenizer: Any, features: Sequence[Any], settings: Any, *, ours: bool, **options: Any) -> Any:
    """The first label is ignored, as that of a prompt."""
    from swift.model import get_model_processor
    from swift.template import get_template
    from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from swift.utils import get_logger

    get_logger().setLevel(logging.ERROR)
    for part in (model, tokenizer):
        part.save_pretrained(settings["output_dir"])
    how = {"model_type": model.config.model_type, "torch_dtype": model.dtype}
    loaded, processor = get_model_processor(settings["output_dir"], **how)
    template = get_template(processor, template_type="chatml", **options)
    template.set_mode("train")
    rows = [{**each, "labels": [IGNORED, *each["labels"][1:]], "length": len(each["labels"])} for each in features]
    args = Seq2SeqTrainingArguments(**settings, dataloader_num_workers=0, check_model=False, remove_unused_columns=False)
    if ours:
        adapt(loaded)
    return Seq2SeqTrainer(model=loaded, args=args, template=template, train_dataset=rows)


_LINE = "collate-npu run -- swift sft"
NEED = {
    "ms-swift, padded right": (_LINE, partial(_trainer, padding_side="right")),
    "ms-swift, padded left": (_LINE, partial(_trainer, padding_side="left")),
    "ms-swift, padding_free=True": (_LINE, partial(_trainer, padding_free=True)),
}
