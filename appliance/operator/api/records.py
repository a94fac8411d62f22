"""What is told of each call: to the audit log, by the supervisor, and to the metrics, by the gateway. Blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.common.errors import UnavailableError
from appliance.common.operator_calls import OperatorCall
from appliance.operator.cli.admin_client import UnreachableError, try_ask
from appliance.operator.fetch_client import order_supervisor

TELEMETRY_S = 2.0
"""Patience with the gateway, in seconds: a count is not worth more."""

BEGUN = "BEGUN"
"""Outcome of a call that is about to change something."""


@dataclass(frozen=True, slots=True)
class Records:
    """Tells of calls. ``config`` is read for every one: an audit log may have come or gone."""

    config: Callable[[], ApplianceConfig]

    def begin(self, call: OperatorCall) -> None:
        """Tell the audit log that a call is about to change something; where there is a log and nothing takes entries,
        nothing is changed.

        Raises:
            ConfigError: the configuration cannot be used.
            UnavailableError: the supervisor, which keeps the log, does not answer.
        """
        config = self.config()
        if config.audit is not None and not _audit(config.run_dir, call):
            raise UnavailableError(
                "the audit log takes no entry, so nothing was changed: the supervisor does not answer"
            )

    def end(self, call: OperatorCall) -> None:
        """Tell the audit log and the metrics of a call that has ended, where they can be told.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        config = self.config()
        if config.audit is not None:
            _audit(config.run_dir, call)
        with suppress(UnreachableError):  # no gateway, no metrics
            try_ask(config.listen.admin, f"/operator/calls?{call.query()}", "POST", TELEMETRY_S)


def _audit(run_dir: Path, call: OperatorCall) -> bool:
    fields = {name: value for name, value in asdict(call).items() if name != "milliseconds"}
    return order_supervisor(run_dir, {"do": "called", **fields})
