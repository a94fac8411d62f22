"""The mistakes of others as data: what each is, which tests show that it is not made here, and what is still absent.

A test is named by its path below ``tests/`` and its function. ``tests/redteam/test_advisories.py`` checks that each is
there, so that no name goes stale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mistake:
    """A class of defects. ``absent`` says what of it this build cannot show yet, and why that is no hole."""

    number: int
    what: str
    tests: tuple[str, ...]
    absent: str = ""


MISTAKES = (
    Mistake(
        1,
        "objects deserialised from foreign bytes: pickle and its kin, torch.load",
        (
            "redteam/test_mistakes.py::test_nothing_deserialises_objects",
            "test_architecture.py::test_words_that_never_appear",
            "test_linters.py::test_ruff_finds_nothing",
            "fuzz/test_targets.py::test_bytes_give_a_value_or_the_typed_error",
        ),
    ),
    Mistake(
        2,
        "remote code, and security checks by assert",
        (
            "test_architecture.py::test_words_that_never_appear",
            "redteam/test_mistakes.py::test_no_check_of_input_is_an_assert",
            "engine/text/test_template.py::test_the_sandbox_shows_no_globals",
        ),
    ),
    Mistake(
        3,
        "sizes in model files believed: safetensors, GGUF, tokenizers",
        (
            "engine/model/test_safetensors.py::test_every_kind_of_corruption_is_refused",
            "engine/model/test_safetensors.py::test_no_damage_to_a_file_gets_past_or_crashes",
            "engine/convert/test_gguf.py::test_no_damage_to_a_file_gets_past_or_crashes",
            "engine/convert/test_gguf.py::test_a_large_file_cannot_make_the_header_large",
            "engine/model/test_weights.py::test_nothing_is_allocated_for_a_description_that_the_files_do_not_fill",
            "engine/text/test_tokenizer.py::test_sizes_are_bounded",
            "isolation/ipc/test_codec.py::test_forged_counts_allocate_nothing",
        ),
    ),
    Mistake(
        4,
        "listeners that nobody declared; engines on a network",
        (
            "system/test_listeners.py::test_nobody_listens_but_on_the_declared_addresses",
            "redteam/test_reach.py::test_nothing_is_reached_from_a_sandbox",
            "isolation/gvisor/test_gvisor.py::test_walls",
            "test_systemd.py::test_neither_service_is_root_and_only_one_has_a_network",
        ),
    ),
    Mistake(
        5,
        "routes without identity, or past it",
        (
            "redteam/test_namespace.py::test_no_field_header_or_metadata_changes_the_namespace",
            "redteam/test_namespace.py::test_every_method_of_the_service_is_walked",
            "appliance/gateway/http/test_hostile_http.py::test_every_route_without_and_with_a_wrong_key",
            "appliance/gateway/http/test_hostile_http.py::test_unknown_paths_are_denied_by_default",
            "appliance/gateway/grpc/test_grpc.py::test_every_method_without_and_with_a_wrong_key",
        ),
    ),
    Mistake(
        6,
        "URLs of a request fetched by the server",
        (
            "redteam/test_mistakes.py::test_nothing_that_serves_can_fetch",
            "system/test_listeners.py::test_no_url_of_a_request_is_fetched",
        ),
    ),
    Mistake(
        7,
        "no caps on headers, bodies, depth, lists, numbers, or on their product",
        (
            "appliance/gateway/http/test_hostile_http.py::test_header_floods_are_cut_off",
            "appliance/gateway/http/test_hostile_http.py::test_a_streamed_giant_is_refused_without_reading_it_all",
            "appliance/gateway/grpc/test_grpc.py::test_metadata_floods_are_refused",
            "appliance/common/test_strict_json.py::test_depth_is_bounded_exactly",
            "appliance/gateway/http/test_body_budget.py::test_parallel_giants_of_one_tenant_are_bounded",
            "redteam/test_mistakes.py::test_the_product_of_counts_is_bounded",
            "appliance/gateway/http/test_openai.py::test_arbitrary_json_gives_a_request_in_range_or_the_one_error",
        ),
    ),
    Mistake(
        8,
        "token ids bounded by the tokenizer and not by the logits",
        (
            "system/test_bad_input.py::test_a_wrong_value_is_refused_with_openais_error",
            "appliance/gateway/sandboxes/test_engine_link.py::test_a_token_beyond_the_vocabulary_ends_the_engine",
            "engine/core/test_engine.py::test_nothing_that_the_wire_admits_ends_the_engine",
            "engine/backends/test_masks.py::test_ids_beyond_the_mask_are_forbidden_and_bits_beyond_the_logits_ignored",
        ),
    ),
    Mistake(
        9,
        "templates of a request, or of a model without limits",
        (
            "appliance/gateway/http/test_openai.py::test_chat_refusals_name_the_field",
            "engine/text/test_template.py::test_bombs_end",
            "engine/text/test_template.py::test_the_output_cap_is_in_bytes",
            "engine/text/test_template.py::test_template_arguments_are_those_the_template_reads",
            "engine/text/test_process.py::test_bombs_leave_the_worker_alive",
        ),
    ),
    Mistake(
        10,
        "grammars and expressions compiled without time, memory or a bounded cache",
        (
            "engine/text/test_grammar_process.py::test_a_bomb_fails_its_own_request",
            "engine/text/test_grammar_process.py::test_a_grammar_that_gets_too_complex_breaks_its_own_row",
            "engine/text/test_grammar_process.py::test_a_tenant_has_so_many_grammars",
            "appliance/gateway/sandboxes/test_grammars.py::test_one_tenant_cannot_open_without_end",
        ),
    ),
    Mistake(
        11,
        "ids of a client used as keys inside",
        (
            "redteam/test_mistakes.py::test_a_client_s_ids_are_no_keys_inside",
            "redteam/test_namespace.py::test_no_field_header_or_metadata_changes_the_namespace",
        ),
    ),
    Mistake(
        12,
        "cache keys that are unframed, unkeyed or cut short",
        (
            "engine/core/kv/test_prefix_cache.py::test_block_id_is_the_documented_hash",
            "engine/core/kv/test_prefix_cache.py::test_block_ids_differ_when_anything_differs",
            "engine/core/kv/test_prefix_cache.py::test_nothing_is_found_from_another_namespace",
            "engine/core/kv/test_layout.py::test_root_differs_with_everything_that_changes_the_bytes",
            "redteam/test_namespace.py::test_no_field_header_or_metadata_changes_the_namespace",
        ),
    ),
    Mistake(
        13,
        "memory handed on with what was in it: buffers, blocks, slots of a batch",
        (
            "engine/core/test_engine.py::test_a_block_is_zero_before_it_serves_another",
            "engine/core/kv/test_block_pool.py::test_a_taken_block_is_zeroed_before_use_whoever_had_it",
            "engine/model/families/test_llama.py::test_garbage_in_free_blocks_changes_nothing",
            "engine/backends/test_batch.py::test_a_row_inherits_no_block_of_its_last_request",
            "engine/backends/test_sampler.py::test_a_row_inherits_nothing_from_its_last_request",
            "engine/core/test_engine.py::test_a_tenants_tokens_do_not_depend_on_anothers_load",
        ),
    ),
    Mistake(
        14,
        "KV that comes back from a tier believed before it is authenticated",
        (
            "isolation/keys/test_seal.py::test_every_flip_cut_and_growth_is_refused",
            "isolation/keys/test_seal.py::test_an_object_opens_under_no_other_name",
            "appliance/supervisor/test_spill_store.py::test_files_that_changed_are_rejected_and_gone",
            "isolation/ipc/test_segment.py::test_changed_layouts_are_refused_or_whole",
        ),
    ),
    Mistake(
        15,
        "a request's error that ends service; health that says nothing",
        (
            "system/test_fuzzed_requests.py::test_fuzzed_requests_kill_nobody",
            "system/test_deaths.py::test_a_request_that_kills_twice_is_quarantined",
            "engine/core/test_engine.py::test_broken_logits_fail_one_request",
            "appliance/gateway/request/test_suspects.py::test_a_second_death_alone_quarantines_that_request_only",
            "appliance/supervisor/test_boot.py::test_a_refused_probe_is_a_failed_start_at_once",
            "appliance/gateway/http/test_http_clients.py::test_health_follows_readiness",
        ),
    ),
    Mistake(
        16,
        "errors that tell of stacks, paths, addresses or other tenants",
        (
            "appliance/gateway/front/test_errors.py::test_each_class_has_a_row_that_both_front_ends_can_send",
            "appliance/gateway/grpc/test_grpc.py::test_a_defect_shows_its_id_and_nothing_else",
            "appliance/common/test_log.py::test_tracebacks_show_no_local_variables",
            "system/test_fuzzed_requests.py::test_fuzzed_requests_kill_nobody",
        ),
    ),
    Mistake(
        17,
        "secrets compared in a time that tells of them",
        (
            "appliance/common/test_keys.py::test_every_outcome_costs_the_same_work",
            "redteam/test_mistakes.py::test_secrets_are_compared_in_constant_time",
        ),
    ),
    Mistake(
        18,
        "limits that one front end has and the other has not",
        (
            "redteam/test_mistakes.py::test_both_front_ends_have_the_same_limits",
            "appliance/gateway/http/test_structured.py::test_grpc_refusals",
        ),
    ),
    Mistake(
        19,
        "figures of tenants shown to tenants",
        (
            "system/test_first_light.py::test_admin_routes_are_not_on_the_tenants_listener",
            "system/test_first_light.py::test_prefixes_are_reused_inside_a_tenant_and_never_across",
            "appliance/gateway/telemetry/test_admin.py::test_a_rebound_name_reaches_nothing",
        ),
    ),
    Mistake(
        20,
        "an advisory mended at one site and not as a class",
        (
            "redteam/test_advisories.py::test_what_an_advisory_teaches_is_tested",
            "redteam/test_advisories.py::test_every_mistake_has_its_tests",
        ),
    ),
)
"""The twenty of GUARANTEES.md, in its order."""
