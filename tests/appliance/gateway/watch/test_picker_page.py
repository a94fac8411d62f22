"""The page of an endpoint picker: which families it has, in which form, and what they count."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from appliance.gateway.watch.picker_page import PickerFigures, page

FOUND = PickerFigures(
    queued=3,
    running=5,
    kv_usage=0.25,
    block_tokens=16,
    blocks=1_024,
    max_adapters=2,
    running_adapters=("m:a", "m:b"),
    waiting_adapters=("m:a",),
    at=1_795_263_000.5,
)


def test_a_picker_finds_what_it_reads() -> None:
    """Each family is there once, as a gauge, under the name that a picker reads where it is told none; the share is
    from 0 to 1, and the adapters' value is the time."""
    families = {family.name: family for family in text_string_to_metric_families(page(FOUND))}
    assert all(family.type == "gauge" and len(family.samples) == 1 for family in families.values())
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values == {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:cache_config_info": 1,
        "vllm:lora_requests_info": FOUND.at,
    }
    assert families["vllm:cache_config_info"].samples[0].labels == {"block_size": "16", "num_gpu_blocks": "1024"}
    assert families["vllm:lora_requests_info"].samples[0].labels == {
        "max_lora": "2",
        "running_lora_adapters": "m:a,m:b",
        "waiting_lora_adapters": "m:a",
    }


def test_what_is_not_there_has_no_family() -> None:
    """Without adapters in memory, and without one size of blocks, the families that would tell of them are left out."""
    text = page(replace(FOUND, max_adapters=0, block_tokens=0))
    assert "lora" not in text and "cache_config" not in text and "num_requests_waiting 3\n" in text
