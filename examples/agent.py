"""An agent that tells an operator about the appliance that it runs on: the model calls tools, this program runs them.

    python agent.py --model MODEL "Is everything up?"

It takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment, needs a model with tools (docs/tools.md), and the
admin listener, which is for operators alone. ``--look`` names a tool that a small model has to call before it answers.
"""

import argparse
import json
from typing import Any

import httpx
from openai import OpenAI


def get_status(admin: httpx.Client) -> Any:
    """State of the appliance: models and alerts."""
    said = admin.get("/status").json()
    models = [{"name": one["name"], "state": one["state"]} for one in said["models"]]
    return {"alerts": [one["what"] for one in said["alerts"]], "models": models}


def explain_denial(admin: httpx.Client, request_id: str) -> Any:
    """Why a request was refused."""
    said = admin.get(f"/traces/{request_id}").json()["summary"]
    return {"request_id": request_id, "tenant": said["tenant"], "rule": said["policy_rule"], "reason": said["error"]}


def offer(tool: Any, **properties: Any) -> Any:
    """The offer of a function of this file, whose arguments are held to their schema."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    about = {"name": tool.__name__, "description": tool.__doc__, "strict": True, "parameters": schema}
    return {"type": "function", "function": about}


asked = argparse.ArgumentParser()
asked.add_argument("question")
asked.add_argument("--model", required=True)
asked.add_argument("--admin", default="http://127.0.0.1:8082")
asked.add_argument("--look", choices=["get_status", "explain_denial"])
given = asked.parse_args()
client, admin = OpenAI(), httpx.Client(base_url=given.admin)
traces = admin.get("/traces?limit=200").json()["traces"]
refused = [one["request_id"] for one in traces if one["outcome"] == "refused"][:20]
tools = [offer(get_status), *([offer(explain_denial, request_id={"enum": refused})] if refused else [])]
fixed: Any = {"model": given.model, "tools": tools, "temperature": 0, "max_tokens": 200}
choice: Any = {"type": "function", "function": {"name": given.look}} if given.look else "auto"
messages: list[Any] = [{"role": "user", "content": given.question}]
for _ in range(4):  # rounds of calls
    message = client.chat.completions.create(messages=messages, tool_choice=choice, **fixed).choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message)
    for call in message.tool_calls:
        found = json.dumps(globals()[call.function.name](admin, **json.loads(call.function.arguments)))
        print(f"{call.function.name}: {found}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    choice = "none" if given.look else "auto"
