"""Lightning's hook gives the model's own batch."""

from types import SimpleNamespace

from collate_npu import BatchAdapter, PaddingCollator
from collate_npu.integrations.lightning import AdaptsBatches


def test_the_hook_adapts():
    module = AdaptsBatches()
    module.adapter = BatchAdapter(SimpleNamespace(layer_types=["full_attention"]), consumer="transformers")
    batch = PaddingCollator(pad_token_id=0)([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert module.on_before_batch_transfer(batch, 0)["attention_mask"].tolist() == [[1, 1], [1, 0]]
