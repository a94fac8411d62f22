"""Text of a first policy, with comments that say what can be written. Pure."""

from __future__ import annotations

SCHEMA_NAME = "policy.schema.json"
"""Name of the JSON Schema beside a policy, which editors read."""

_TEXT = """\
# yaml-language-server: $schema={schema}
#
# Who may use which models, and how much. What is not written here is denied.
# Check:         athanor policy check {name}
# Compare:       athanor policy diff {name}
# Ask:           athanor policy explain {name} --tenant {tenant} --model athanor-mini
# Put in force:  athanor policy apply {name}    (athanor reload, if athanor.yaml names this file)
version: 1
tenants:
  {tenant}:
    # Make the key: athanor key create {tenant} --id {tenant}-1
    # A client certificate is named by its SPIFFE URI: spiffe://example.org/tenant/{tenant}
    credentials: ["key:{tenant}-1"]

    # Names of served models; * stands for any characters.
    models: ["*"]

    # Rates are also bursts, unless one is written as {{rate: 600, burst: 1200, exceeded: queue}}: then requests
    # beyond it wait (or run with low priority: downgrade) in place of being refused.
    limits:
      requests_per_minute: 600
      tokens_per_minute: 200000    # prompts and outputs together
      concurrency: 64
      max_context_tokens: 4096
      max_output_tokens: 1024
      # input_tokens_per_minute: 150000    # prompts apart, beside tokens_per_minute
      # output_tokens_per_minute: 50000
      # kv_tokens: 100000      # KV of running requests at once: prompts and the most they may write
      # spend_per_day: 20      # what the requests of a day may cost; needs prices, below
      # spend_per_month: 300

    # What follows are the defaults; take the # away to change one.
    # class: shared            # strict or dedicated: kept further apart from other tenants
    # retention: standard      # none: nothing is kept after a request
    # kv_export: false         # true: sealed KV may lie in the store outside of the machine
    # kv_fleet: false          # true: with kv_export, other hosts of the fleet use it too
    # priority: normal         # high or low; between tenants of one priority the weight decides
    # weight: 1
    # namespace: tenant        # user: cached prefixes of an end user are found by nobody else's requests
    # deterministic: never     # allowed or always: the same bits in any batch
    # adapters: []             # ["athanor-mini:support"]: adapters of models that it alone may use
    # networks: []             # ["10.0.0.0/8"]: its credentials are taken from there alone
    # regions: []              # ["eu-central"]: it is served by appliances of these regions alone
    # model_regions: []        # [{{models: ["gpt-*"], regions: ["us-east"]}}]: regions of some models
    # hours: []                # ["mon-fri 08:00-18:00"]: it is served then alone, UTC
    # external: by_class       # allow, refuse: models that a cluster outside of the appliance computes
    # freeze_idle: false       # true: sandboxes that it uses may be frozen while idle
    # features: {{structured_output: true, tokenize: true, tools: true, attestation: true, reasoning: true}}
    #   (and embeddings: true; false: no vectors of texts)
    #   (and rerank: true; false: no documents are scored and no texts classified)
    #   (and wake: true; false: a model that sleeps is refused until others have woken it)
    #   (and batches: false; true: files and batches, kept sealed on disk up to limits.max_stored_bytes)
    #   (and stored_responses: false; true: answers of /v1/responses are kept likewise, for 30 days)
    # content: {{denied_fields: [], roles: []}}    # fields that are refused; roles that are taken
    # end_users: {{concurrency: null}}    # and requests_per_minute, output_tokens_per_minute: of each of its users
    # kv: {{reservation: 0%, borrow: true}}
    # unsafe_allow_all: false  # true, for a trial: every model and feature without limits; then no models and limits

# Settings for several tenants: a tenant with "inherits: staff" gets the keys of that group that it does not have
# itself. Groups inherit likewise, and defaults are for all tenants. No cached prefixes are shared by this.
# defaults:
#   limits: {{requests_per_minute: 300}}
# tenant_groups:
#   staff:
#     models: ["*"]
#     limits: {{tokens_per_minute: 500000}}

# Tenants that share cached prefixes; each can tell by response times what another has sent.
# sharing_groups:
#   lab:
#     tenants: [{tenant}, another-tenant]

# Beginnings of prompts that are computed once and always there.
# public_prefixes:
#   house-style:
#     model: athanor-mini
#     tenants: all
#     text: "You answer briefly."

# What a million tokens cost; the first that matches decides. Limits of spend need them.
# prices:
#   currency: EUR
#   rules:
#     - {{models: ["*"], input: 0.50, cached_input: 0.05, output: 1.50}}
#       # and cheaper for requests of batches: batch: {{input: 0.25, output: 0.75}}

# Names that lead to one of several models: clients send the name in place of a model's.
# routes:
#   fast:
#     to: [{{model: athanor-mini, weight: 95}}, {{model: athanor-next, weight: 5}}]
#     fallback: [backup-model]
#     fall_back_when: [unready, busy, asleep]
"""


def first_policy(name: str, tenant: str, schema: str = f"./{SCHEMA_NAME}") -> str:
    """Return the text of a policy of one tenant.

    Args:
        name: path of the file, as its comments name it.
        tenant: id of the tenant.
        schema: address of the JSON Schema, from the file's folder.
    """
    return _TEXT.format(name=name, tenant=tenant, schema=schema)
