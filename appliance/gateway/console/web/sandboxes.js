// Sandboxes and policy: what holds the models, and by whose rules.

import { byId, Keyed, make, setAttribute, setNumber, setText } from "./dom.js";
import { age, clock, count, counted, DASH } from "./format.js";

const list = new Keyed(byId("boxes"), (box) => box.key, () => {
  const name = make("span", { class: "name" });
  const role = make("span", { class: "tag" });
  const state = make("td", {}, make("span", { class: "dot", "aria-hidden": "true" }), make("span", {}));
  const [up, restarts, pid] = ["num", "num", "num mid"].map((name) => make("td", { class: name }));
  const node = make("tr", {}, make("th", { scope: "row" }, name, role), state, up, restarts, pid);
  return {
    node,
    update(box) {
      setText(name, box.name);
      setText(role, box.role);
      setAttribute(state, "class", `state ${level(box.state)}`);
      setText(state.lastChild, box.frozen ? "frozen" : box.state);
      setText(up, age(box.now - box.since));
      setNumber(restarts, box.restarts, count);
      setAttribute(restarts, "data-some", box.restarts > 0);
      setText(pid, box.pid === null ? DASH : String(box.pid));
    },
  };
});

function level(state) {
  return ["ready", "asleep"].includes(state) ? "well" : ["failed", "hung", "stopped"].includes(state) ? "broken" : "degraded";
}

/** Sandboxes, of shared models first. */
export function showSandboxes(picture) {
  const boxes = [...picture.models, ...picture.own].flatMap((model) => model.sandboxes.map((box) => ({
    ...box, now: picture.now, key: `${model.name}/${model.tenant}/${box.role}`,
    name: model.tenant ? `${model.name} of ${model.tenant}` : model.name })));
  list.show(boxes);
  const more = picture.own_total - picture.own.length;
  const also = more > 0 ? ` ${counted(more, "more tenant")} with sandboxes of their own not shown.` : "";
  setText(byId("boxes-note"), `${picture.sandbox}, ${picture.limits}.${also}`);
}

const facts = ["In force", "Loaded", "Last reload", "File"].map((title) => {
  const value = make("dd", {});
  byId("policy").append(make("dt", {}, title), value);
  return value;
});

/** The policy in force, and how the last attempt to replace it ended. */
export function showPolicy(picture) {
  const policy = picture.policy;
  const at = policy.last_attempt_at;
  const values = [
    `${policy.digest.slice(0, 12)}, ${counted(picture.tenants.total, "tenant")}`,
    `${clock(policy.loaded_at, picture.now)}, ${age(picture.now - policy.loaded_at)} ago`,
    policy.last_error !== null ? `refused ${at ? `at ${clock(at, picture.now)}` : ""}: ${policy.last_error}`
      : at && picture.load.up_s - (picture.now - policy.loaded_at) > 5 ? "accepted" : "none since the start",
    policy.file,
  ];
  facts.forEach((node, index) => setText(node, values[index]));
  setAttribute(facts[2], "class", policy.last_error !== null ? "broken" : null);
}
