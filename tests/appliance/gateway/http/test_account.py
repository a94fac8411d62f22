"""/v1/limits and /v1/usage over a real socket: exact amounts, one tenant, no credential no answer."""

from __future__ import annotations

import httpx
import pytest

from appliance.common.errors import UnavailableError
from appliance.common.usage.pseudonyms import name_digest
from appliance.gateway.front.end_user import MAX_END_USER_CHARS
from tests.appliance.gateway.front.support import MODEL, Running


async def get(running: Running, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to a tenant's request."""
    async with httpx.AsyncClient(base_url=running.base_url) as client:
        return await client.get(path, headers=running.authorization if headers is None else headers)


async def test_limits_are_told_with_what_is_left(running: Running) -> None:
    """Numbers of a rate, exact texts of money, and the tenant whose they are."""
    answer = await get(running, "/v1/limits")
    found = answer.json()
    assert (answer.status_code, found["object"], found["tenant"], found["currency"]) == (200, "limits", "acme", "EUR")
    rate, spend = found["limits"]
    assert rate == {
        "name": "requests_per_minute",
        "unit": "requests",
        "limit": 60,
        "most": 60,
        "left": 59,
        "full_in_s": 1.0,
        "exceeded": "refuse",
    }
    assert (spend["unit"], spend["limit"], spend["left"]) == ("currency", "10.00", "9.500000001")
    assert (found["running_requests"], found["waiting_requests"]) == (1, 0)
    assert (found["max_context_tokens"], found["max_output_tokens"]) == (4_096, 1_024)


async def test_usage_is_told_by_model_with_totals(running: Running) -> None:
    """Two models in the month, the second without a name: all others; totals add up, costs are exact."""
    found = (await get(running, "/v1/usage")).json()
    assert (found["object"], found["tenant"], found["currency"]) == ("usage", "acme", "EUR")
    one = {"requests": 3, "input_tokens": 30, "cached_tokens": 10, "output_tokens": 20}
    one |= {"reasoning_tokens": 15, "cost": "1.50"}
    assert found["day"]["models"] == [{"model": MODEL, **one}]
    assert found["day"]["total"] == one
    assert [row["model"] for row in found["month"]["models"]] == [MODEL, None]
    assert found["month"]["total"]["cost"] == "1.500000001"
    assert found["month"]["total"]["requests"] == 4
    assert (found["day"]["begins_at"], found["day"]["ends_at"]) == (1_700_006_400, 1_700_092_800)


async def test_end_users_are_told_by_pseudonym_and_one_by_its_name(running: Running) -> None:
    """Rows by pseudonym, the one without a pseudonym is all others; with a name in the query that end user alone. A
    name that is too long, and one that stands twice, are refused with the field."""
    found = (await get(running, "/v1/usage")).json()
    assert [row["user"] for row in found["day"]["users"]] == ["aa11", None]
    assert found["day"]["users"][0]["cost"] == "1.00"
    assert found["month"]["users"] == []
    (row,) = (await get(running, "/v1/usage?user=ann%40example.org")).json()["day"]["users"]
    assert row["user"] == name_digest("ann@example.org")  # what the service was asked about; the name goes no further
    answer = await get(running, "/v1/usage?user=" + "a" * (MAX_END_USER_CHARS + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")
    assert (await get(running, "/v1/usage?user=a&user=b")).status_code == 400


@pytest.mark.parametrize("path", ["/v1/limits", "/v1/usage"])
async def test_nobody_without_a_credential_is_told(running: Running, path: str) -> None:
    """A stranger is refused, and so is another method."""
    assert (await get(running, path, {})).status_code == 401
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        assert (await client.post(path)).status_code == 405


async def test_an_unreadable_book_is_a_retryable_error(running: Running) -> None:
    """What the supervisor says reaches the caller; limits need no supervisor."""
    running.service.script = [UnavailableError("the usage book cannot be read now", retry_after_s=1.0)]
    answer = await get(running, "/v1/usage")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (await get(running, "/v1/limits")).status_code == 200


async def test_padded_tenants_get_answers_of_few_lengths(running: Running) -> None:
    """The lengths of both answers are the same for a tenant of a padded class, and differ for others (control)."""
    plain = [len((await get(running, path)).content) for path in ("/v1/limits", "/v1/usage")]
    running.service.padded.add("acme")
    padded = [len((await get(running, path)).content) for path in ("/v1/limits", "/v1/usage")]
    assert plain[0] != plain[1] and padded[0] == padded[1]
