"""``python -m policy.export > policy/schema.json``: writes the JSON Schema of policy files to standard output."""

from __future__ import annotations

import sys

from policy.schema import schema_text

if __name__ == "__main__":
    sys.stdout.write(schema_text())
