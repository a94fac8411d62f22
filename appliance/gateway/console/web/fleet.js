// The page of the fleet: a look every five seconds while somebody reads it.

import { byId, cells, Keyed, make, setAttribute, setText } from "./dom.js";
import { count, counted, percent } from "./format.js";
import { contact, live } from "./head.js";
import { Poll } from "./poll.js";
import { startTheme } from "./theme.js";

const PERIOD_MS = 5000;
const PATIENCE_MS = 40000; // 256 silent hosts are given up after 24 s.
const DIGEST = 12; // Characters of a digest, as `athanor fleet status` shows.
const MARKS = { broken: "\u2715", degraded: "!", note: "i", well: "\u2713" };
const LEVELS = { serving: "well", draining: "degraded", "not ready": "broken", silent: "broken" };

const problems = new Keyed(byId("problems"), (one) => one.key, (first) => {
  const mark = make("span", { class: "mark", "aria-hidden": "true" }, MARKS[first.level]);
  const what = make("strong", {});
  const line = make("p", { class: "line" });
  const values = make("ul", { class: "values" });
  const command = make("code", {});
  const action = make("p", { class: "line" }, make("b", {}, "Do"), make("span", {}, command));
  const rows = new Keyed(values, (text) => text, (text) => ({ node: make("li", {}, text), update() {} }));
  return {
    node: make("li", {}, mark, make("div", {}, make("p", { class: "what" }, what), line, values, action)),
    update(one) {
      setAttribute(this.node, "class", `alert ${one.level}`);
      setText(mark, MARKS[one.level]);
      setText(what, one.what);
      setText(line, one.line ?? "");
      line.hidden = !one.line;
      rows.show(one.values ?? []);
      values.hidden = !one.values;
      setText(command, one.command ?? "");
      action.hidden = !one.command;
    },
  };
});

const hosts = new Keyed(byId("hosts"), (one) => one.name, () => {
  const parts = cells([["th", "text"], ["td", "state"], ["td", "mid"], ["td", "wide"], ["td", "digest"], ["td", "num"],
    ["td", "num mid"], ["td", "num mid"], ["td", "after"], ["td", "num wide"], ["td", "wide after"]]);
  const [name, state, role, version, policy, running, waiting, free, keys, shreds, store] = parts;
  const word = make("span", {});
  state.append(make("span", { class: "dot", "aria-hidden": "true" }), word);
  return {
    node: make("tr", {}, ...parts),
    update(one) {
      const silent = one.state === "silent";
      setText(name, one.name);
      setAttribute(name, "title", one.name);
      setAttribute(state, "class", `state ${LEVELS[one.state] ?? "degraded"}`);
      setText(word, one.state);
      setText(role, silent ? "-" : one.role);
      setOdd(version, silent ? "-" : one.version, one.differs.includes("version"));
      setOdd(policy, silent ? "-" : one.policy.slice(0, DIGEST), one.differs.includes("policy"));
      setAttribute(policy, "title", one.policy || null);
      setText(running, silent ? "-" : count(one.running));
      setText(waiting, silent ? "-" : count(one.waiting));
      setText(free, one.kv_free === null ? "-" : percent(one.kv_free));
      setOdd(keys, one.kv_keys || "-", one.kv_keys === "none");
      setText(shreds, silent ? "-" : count(one.shreds));
      setOdd(store, storeWord(one), one.store !== "");
      setAttribute(store, "title", one.store || null);
    },
  };
});

/** Text that is amber, and says so in words, where it is not what it should be. */
function setOdd(node, text, odd) {
  setText(node, text);
  setAttribute(node, "class", `${node.className.replace(/ ?\bodd\b/, "")}${odd ? " odd" : ""}`.trim() || null);
}

function storeWord(one) {
  if (one.state === "silent" || (!one.shares_limits && !one.store)) return "-";
  return one.store ? "away" : "no problem";
}

function told(look) {
  live(look);
  const all = [...found(look)];
  problems.show(all.length ? all : [{ key: "well", level: "well", what: "All hosts serve, and none differs" }]);
  byId("tiles").hidden = byId("hosts-part").hidden = look.hosts.length === 0;
  hosts.show(look.hosts);
  showTiles(look);
  setText(byId("hosts-note"), note(look));
}

function* found(look) {
  if (look.problem) {
    yield { key: "list", level: "broken", what: "The list of hosts cannot be used", values: look.problem.split("\n"),
      command: "athanor fleet status" };
    return;
  }
  if (!look.listed) {
    yield { key: "unlisted", level: "note", what: "This appliance is told of no other host",
      line: "The row is its own. With listen: fleet_hosts in athanor.yaml every host of the fleet is here." };
    return;
  }
  for (const one of look.hosts.filter((host) => host.state === "silent")) {
    yield { key: `silent ${one.name}`, level: "broken", what: `${one.name} does not answer`, values: [one.problem] };
  }
  for (const one of look.hosts.filter((host) => host.state === "not ready")) {
    yield { key: `unready ${one.name}`, level: "broken", what: `${one.name} serves not all of its models`,
      values: ["Its own console and athanor status say why."] };
  }
  for (const one of look.differences) {
    yield { key: `differs ${one.what}`, level: "degraded", what: `${upper(one.what)} differs between hosts`,
      values: Object.entries(one.values).map(([value, names]) => `${shown(one.what, value)}: ${names.join(", ")}`),
      command: "athanor fleet diff" };
  }
  for (const one of look.hosts.filter((host) => host.kv_keys === "none")) {
    yield { key: `keys ${one.name}`, level: "degraded", what: `${one.name} has no keys of the fleet's shared KV`,
      values: ["It has been without the host that gives keys for longer than its lease: it shares no KV, and computes all prompts."] };
  }
  for (const one of look.hosts.filter((host) => host.store)) {
    yield { key: `store ${one.name}`, level: "degraded", what: `The store of the limits is away from ${one.name}`,
      values: [`It has its own part of each limit, and borrows nothing: ${one.store}`] };
  }
  for (const one of look.hosts.filter((host) => host.state === "draining")) {
    yield { key: `drains ${one.name}`, level: "note", what: `${one.name} drains`,
      values: [one.running + one.waiting ? `${counted(one.running + one.waiting, "request")} left` : "Nothing runs there any more."],
      command: `athanor fleet drain ${one.name} --resume` };
  }
}

const upper = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

function shown(what, value) {
  return what === "list of hosts" || what === "version" ? value : value.slice(0, 2 * DIGEST);
}

function showTiles(look) {
  const answered = look.hosts.filter((host) => host.state !== "silent");
  const serving = look.hosts.filter((host) => host.state === "serving").length;
  const others = ["draining", "not ready", "silent"].map((state) => [state, look.hosts.filter((host) => host.state === state).length]);
  big("serving", count(serving), serving < look.hosts.length);
  setText(byId("serving-of"), `of ${count(look.hosts.length)}`);
  setText(byId("serving-note"), others.filter(([, number]) => number).map(([state, number]) => `${number} ${state}`).join(", ") || "none drains, all answer");
  const policies = new Set(answered.map((host) => host.policy));
  big("policy", answered.length === 0 ? "unknown" : policies.size === 1 ? "equal" : `${policies.size} different`, policies.size !== 1);
  setText(byId("policy-note"), policies.size === 1 ? [...policies][0].slice(0, 2 * DIGEST) : "by digest; amber below: not as on most hosts");
  const members = answered.filter((host) => host.kv_keys);
  const held = members.filter((host) => host.kv_keys === "held").length;
  big("keys", members.length ? count(held) : "none", held < members.length);
  setText(byId("keys-of"), members.length ? `of ${count(members.length)} held` : "");
  setText(byId("keys-note"), members.length ? "under leases that run" : "no host is a member of a fleet's list");
  const shreds = answered.reduce((sum, host) => sum + host.shreds, 0);
  big("shreds", count(shreds), false);
  setText(byId("shreds-note"), shreds ? "complete once every member has said so, or its lease is over" : "none that a host still has to learn of");
}

function big(id, text, odd) {
  setText(byId(id), text);
  setAttribute(byId(id), "data-odd", odd);
}

function note(look) {
  const pinned = look.unknown.length ? `Not compared, since no host pins a digest: ${look.unknown.join(", ")}. ` : "";
  return `${pinned}${look.listed ? "Asked at" : "Told at"} ${new Date(look.now * 1000).toISOString().slice(11, 19)} UTC.`;
}

function lost(reason, refused) {
  contact("lost", refused ? "no answer" : "no contact");
  problems.show([{ key: "lost", level: "broken", what: refused ? `The fleet cannot be shown: ${reason}` : `No contact with the gateway: ${reason}`,
    values: ["What is below is from before."], command: "athanor fleet status" }]);
}

const poll = new Poll("fleet", () => "", told, lost, { period: PERIOD_MS, patience: PATIENCE_MS });
startTheme();
poll.turn();
