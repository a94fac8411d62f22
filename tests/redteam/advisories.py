"""Public advisories of serving systems as data: id, what went wrong, the class of mistake it belongs to (``mistakes``),
and where that class has many sides the very tests that show this one.

Sources: the CVE records and GitHub advisories themselves. Ids of one root cause stand in one row, the incomplete fix
beside the first one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advisory:
    """One root cause."""

    ids: tuple[str, ...]
    what: str
    mistake: int
    tests: tuple[str, ...] = ()
    """Of this one in particular, beside those of its class."""


_PICKLE = "redteam/test_mistakes.py::test_nothing_deserialises_objects"

ADVISORIES = (
    # vLLM
    Advisory(("CVE-2025-25183",), "a predictable hash names cached prefixes", 12),
    Advisory(
        ("CVE-2025-46570",),
        "whose prefix is cached shows in the time to the first token",
        12,
        ("system/test_first_light.py::test_prefixes_are_reused_inside_a_tenant_and_never_across",),
    ),
    Advisory(("CVE-2025-46722", "PYSEC-2025-43"), "a cache key leaves out what changes the content", 12),
    Advisory(
        ("CVE-2025-32444", "CVE-2025-29783", "CVE-2025-30165", "CVE-2025-30202", "CVE-2025-47277"),
        "pickle over sockets that listen everywhere",
        1,
        ("system/test_listeners.py::test_nobody_listens_but_on_the_declared_addresses",),
    ),
    Advisory(
        ("CVE-2025-48956",),
        "one huge header exhausts memory",
        7,
        ("appliance/gateway/http/test_hostile_http.py::test_header_floods_are_cut_off",),
    ),
    Advisory(("CVE-2025-59425",), "the API key compared with ==", 17),
    Advisory(("CVE-2025-62164", "CVE-2026-56340"), "torch.load of a request's tensor, then sparse ones", 1),
    Advisory(
        ("CVE-2025-62426",),
        "arguments of the template override the tokenizer's",
        9,
        ("engine/text/test_template.py::test_template_arguments_are_those_the_template_reads",),
    ),
    Advisory(("CVE-2025-66448", "CVE-2026-22807", "CVE-2026-27893"), "remote code although it is switched off", 2),
    Advisory(("CVE-2026-22778", "CVE-2026-54236"), "an error text tells a heap address, then on another route", 16),
    Advisory(("CVE-2026-24779", "CVE-2026-25960"), "a URL fetched; two parsers that disagree about it", 6),
    Advisory(
        ("CVE-2026-34756",),
        "n without a bound",
        7,
        ("redteam/test_mistakes.py::test_the_product_of_counts_is_bounded",),
    ),
    Advisory(
        ("CVE-2026-73559",),
        "a list of prompts fans out without a bound",
        7,
        ("appliance/gateway/http/test_openai.py::test_completion_refusals_name_the_field",),
    ),
    Advisory(
        ("CVE-2026-41523",),
        "a check of input by assert, gone under python -O",
        2,
        ("redteam/test_mistakes.py::test_no_check_of_input_is_an_assert",),
    ),
    Advisory(("CVE-2026-7141", "GHSA-x368-4g9h-fvv4"), "recycled KV blocks are not initialised", 13),
    Advisory(("CVE-2026-53923",), "an integer cut to 32 bits returns memory that was never written", 13),
    Advisory(("CVE-2026-55574", "PYSEC-2026-3933"), "an expression compiled without a time limit; a third backend", 10),
    Advisory(
        ("CVE-2025-29770", "CVE-2025-32381"),
        "a cache of grammars without a bound",
        10,
        ("engine/text/test_grammar_process.py::test_a_tenant_has_so_many_grammars",),
    ),
    Advisory(("CVE-2026-93840", "CVE-2026-93989"), "ids index beyond the logits and change others' rows", 8),
    Advisory(
        ("CVE-2026-94627",),
        "children of one request share a transfer id",
        11,
        ("engine/core/scheduler/test_siblings.py::test_a_familys_own_key_is_nobody_elses",),
    ),
    Advisory(("CVE-2026-100650", "CVE-2026-130686"), "media fetched and decoded before any limit", 6),
    Advisory(("CVE-2026-105754",), "a caller's own hashes poison a cache", 11),
    Advisory(
        ("CVE-2026-105755",),
        "X-Request-Id is a key inside",
        11,
        ("redteam/test_mistakes.py::test_a_client_s_ids_are_no_keys_inside",),
    ),
    Advisory(("CVE-2026-105756", "CVE-2026-105757"), "a bad salt or a bad grammar ends the engine", 15),
    Advisory(
        ("CVE-2026-114051",),
        "a thread dies of a request and health says 200",
        15,
        ("appliance/gateway/http/test_http_clients.py::test_health_follows_readiness",),
    ),
    Advisory(("CVE-2026-114052",), "a cache keyed by a request's arguments grows without end", 9),
    Advisory(("CVE-2026-114053",), "a route goes past the API key", 5),
    Advisory(("CVE-2026-115911", "CVE-2026-115918"), "a request's template runs without time, size or loops", 9),
    Advisory(("CVE-2026-116173", "PYSEC-2026-4353"), "the second front end lacks the first one's limits", 18),
    Advisory(("GHSA-v97p-wpxp-px84", "GHSA-fpch-3xrf-7q96"), "a slot of the batch keeps what another left", 13),
    # SGLang, LMDeploy, Ray, llama.cpp and others
    Advisory(("CVE-2026-3059", "CVE-2026-3060", "CVE-2026-3989", "CVE-2026-7304"), "pickle and dill over ZMQ", 1),
    Advisory(
        ("CVE-2026-14890", "CVE-2026-15969", "CVE-2026-15976", "CVE-2026-86793", "CVE-2026-93034", "CVE-2026-93088"),
        "unpickling by a list of what is forbidden",
        1,
        (_PICKLE,),
    ),
    Advisory(("CVE-2025-59953", "CVE-2025-66455", "CVE-2026-76850"), "types checked after unpickling", 1, (_PICKLE,)),
    Advisory(("CVE-2026-33626", "CVE-2026-63764"), "a URL checked once and its redirect not", 6),
    Advisory(
        ("CVE-2025-23319", "CVE-2025-23320", "CVE-2025-23334"),
        "an error tells the name of shared memory, and a client registers it",
        16,
        (
            "redteam/test_reach.py::test_nothing_is_reached_from_a_sandbox",
            "isolation/ipc/test_segment.py::test_a_sealed_memfd_keeps_its_size",
        ),
    ),
    Advisory(
        ("CVE-2025-23310",),
        "the stack overflows of many small chunks",
        7,
        ("appliance/gateway/http/test_hostile_http.py::test_trailers_count_as_headers",),
    ),
    Advisory(
        ("CVE-2025-23316",),
        "a model's name becomes a path",
        11,
        ("appliance/common/test_config.py::test_problems_are_placed",),
    ),
    Advisory(("CVE-2026-24206", "CVE-2026-24207"), "identity gone round by another path", 5),
    Advisory(("CVE-2025-33255", "CVE-2026-24142"), "handles of other processes deserialised", 1),
    Advisory(("CVE-2026-65119",), "a router loads a tokenizer's code", 2),
    Advisory(("CVE-2026-0599",), "links in a text fetched before any limit", 6),
    Advisory(
        ("CVE-2024-37032", "CVE-2026-103663"),
        "a digest becomes a path",
        3,
        (
            "engine/model/test_weights.py::test_the_index_may_name_plain_files_only",
            "appliance/common/test_catalog.py::test_a_link_out_of_the_models_folder_is_refused",
        ),
    ),
    Advisory(
        ("CVE-2026-7482",),
        "a tensor declared larger than its file shows the heap",
        3,
        ("engine/convert/test_gguf.py::test_every_kind_of_corruption_is_refused",),
    ),
    Advisory(
        ("CVE-2024-42478", "CVE-2024-42479", "CVE-2026-34159", "CVE-2026-118375"),
        "pointers and sizes of a remote tensor believed",
        3,
        ("redteam/test_hostile_guest.py::test_a_breach_ends_the_sandbox",),
    ),
    Advisory(
        ("CVE-2024-21802", "CVE-2024-23605", "CVE-2025-53630", "CVE-2026-27940", "CVE-2026-33298"),
        "a product of sizes overflows, in four places one after another",
        3,
    ),
    Advisory(
        ("CVE-2026-21869",),
        "a negative count is taken",
        7,
        ("appliance/gateway/http/test_openai.py::test_completion_refusals_name_the_field",),
    ),
    Advisory(("CVE-2026-43629",), "restored KV writes beyond its buffer", 14),
    Advisory(
        ("CVE-2024-34359",),
        "a model's template runs code",
        9,
        ("engine/text/test_template.py::test_the_sandbox_shows_no_globals",),
    ),
    Advisory(("CVE-2023-48022", "CVE-2023-48023", "CVE-2023-6019"), "a job's API without identity", 5),
    Advisory(
        ("CVE-2025-62593",),
        "a browser made to speak to a local service",
        19,
        (
            "appliance/gateway/telemetry/test_admin.py::test_no_web_page_can_reload",
            "appliance/gateway/http/test_hostile_http.py::test_only_allowed_hosts_are_served",
        ),
    ),
    Advisory(("CVE-2026-10813",), "a hash cut to 16 bits", 12),
    Advisory(
        ("CVE-2026-107204", "CVE-2026-107205", "CVE-2026-107206", "CVE-2026-107207"),
        "scripts and quotas open to anybody",
        5,
        ("system/test_first_light.py::test_admin_routes_are_not_on_the_tenants_listener",),
    ),
    Advisory(
        ("CVE-2026-89032",),
        "a cached answer of another tenant",
        12,
        ("system/test_first_light.py::test_prefixes_are_reused_inside_a_tenant_and_never_across",),
    ),
    Advisory(("CVE-2025-32434", "CVE-2026-24747"), "weights_only is no boundary", 1),
    Advisory(("CVE-2023-4969",), "memory of another left over", 13),
    # Sandboxes
    Advisory(
        ("CVE-2026-96812",),
        "a device node of the image leads to the host",
        4,
        (
            "images/test_rootfs.py::test_odd_files_are_refused",
            "redteam/test_reach.py::test_nothing_is_reached_from_a_sandbox",
        ),
    ),
    Advisory(
        ("CVE-2024-0132", "CVE-2025-23266"),
        "a container's toolkit mounts or runs what the image says",
        4,
        ("isolation/gvisor/test_bundle.py::test_config_is_the_golden_file",),
    ),
)
"""Each belongs to a class that a server like this one could have."""
