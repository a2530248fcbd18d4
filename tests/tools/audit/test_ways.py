"""Ways: each way of handing over has a title and a meaning; long names lose their middle."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from found import CHECKPOINT, finding

from collate_npu.tools.audit.flat import FLAT_OTHERS, FLAT_OURS
from collate_npu.tools.audit.handover import OTHERS, OURS
from collate_npu.tools.audit.sharded import OTHERS_SHARDED, OURS_SHARDED
from collate_npu.tools.audit.ways import WAYS, kind_of, listed, shortened, way_of


def test_every_way_has_a_title_of_its_own():
    assert set(WAYS["padded"]) == {*OURS, *OTHERS}
    assert set(WAYS["packed"]) == {*FLAT_OURS, *FLAT_OTHERS}
    assert set(WAYS["cp"]) == {*OURS_SHARDED, *OTHERS_SHARDED}
    for ways in WAYS.values():
        assert len({way.title for way in ways.values()}) == len(ways)
        assert all(len(way.title) <= 20 for way in ways.values())


def test_a_collator_of_yours_goes_by_its_name():
    assert way_of(finding(column="my.module:make", whose="yours")).title == "my.module:make"
    assert [kind_of(finding(side=side)) for side in ("left", "right", "packed", "cp 4")] == [
        "padded",
        "padded",
        "packed",
        "cp",
    ]


def test_a_long_path_keeps_its_ends():
    short = shortened(CHECKPOINT, 30)
    assert len(short) == 30
    assert short.startswith("/home/som...")
    assert short.endswith("of-qwen3-next")
    assert shortened("qwen3_next", 30) == "qwen3_next"


def test_a_list_says_how_many_more():
    assert listed("abcabc") == "a, b, c"
    assert listed("abcd", 3) == "a, b, c, d"
    assert listed("abcde", 3) == "a, b, c and 2 more"
