"""The launch script of the guide, its words parsed by the class that `megatron sft` parses them with."""

from pathlib import Path

import pytest
from launches import CARDS, JOBS, check_sizes, words_of
from swift.megatron.arguments import MegatronSftArguments
from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

import collate_npu

NEEDS = ("swift", "mcore_bridge", "megatron")


@pytest.mark.parametrize("job", JOBS)
def test_megatron_sft_knows_every_word(job, tmp_path):
    words, env = words_of("ms-swift.sh", "megatron", job, tmp_path)
    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronSftArguments])
    given, rest = parser.parse_known_args(words[1:])
    assert (words[0], rest) == ("sft", [])
    sizes = [getattr(given, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")]
    check_sizes(job, *sizes, CARDS // (sizes[0] * sizes[1] * sizes[2]), given.expert_model_parallel_size)
    assert (given.padding_free, given.sequence_parallel) == (False, True)
    assert (env["COLLATE_NPU_GUARD"], env["NPROC_PER_NODE"]) == ("1", str(CARDS))
    assert (given.model, given.dataset) == ("MODEL", ["DATASET"])
    assert [Path(path) for path in given.external_plugins] == [
        Path(collate_npu.__file__).parent / "integrations/swift/plugin.py"
    ]
    assert given.global_batch_size % (given.micro_batch_size * CARDS // (sizes[0] * sizes[1] * sizes[2])) == 0


def test_a_word_that_is_not_ms_swifts_would_be_seen():
    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronSftArguments])
    assert parser.parse_known_args(["--expert_parallel_size", "4"])[1] == ["--expert_parallel_size", "4"]
