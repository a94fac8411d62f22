// Tenants: those at work first, page by page; each opens into its limits.

import { byId, cells, Keyed, make, setAttribute, setNumber, setStyle, setText } from "./dom.js";
import { count, counted, percent, rate, short } from "./format.js";

const COLUMNS = 9;
const PAGE = 12; // As many as the gateway gives in one look.
const STILL_S = 10;
const QUIET_MS = 200; // After the last key before the gateway is asked.

export const page = { offset: 0, find: "" };

const list = new Keyed(byId("tenants"), (one) => one.id, build);

function meter() {
  const fill = make("span", {});
  const words = make("span", {});
  return { node: make("span", { class: "meter" }, make("span", { class: "track", "aria-hidden": "true" }, fill), words), fill, words };
}

function setMeter(one, share, text) {
  setText(one.words, text);
  setStyle(one.fill, "width", `${Math.max(0, Math.min(100, 100 * share)).toFixed(1)}%`);
  setAttribute(one.fill, "class", share >= 0.95 ? "full" : null);
  setAttribute(one.node, "data-none", !(share > 0));
}

let rowNumber = 0;

function build(first) {
  const id = `t-${(rowNumber += 1)}`;
  const limits = make("dl", { class: "facts wide" });
  const extra = make("tr", { class: "detail", hidden: true, id }, make("td", { colspan: COLUMNS }, limits));
  const button = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": id, onclick: () => {
    extra.hidden = !extra.hidden;
    setAttribute(button, "aria-expanded", String(!extra.hidden));
  } }, first.id);
  const row = cells([["th", "text"], ["td", "wide"], ["td", "num"], ["td", "num"], ["td", "num wide"], ["td", "num"], ["td", "num wide"],
    ["td", "num wide"], ["td", "num wide"]]);
  const flying = meter();
  const left = meter();
  row[0].append(button);
  row[2].append(flying.node);
  row[6].append(left.node);
  return {
    node: make("tr", {}, ...row),
    extra,
    update(one) {
      setText(row[1], one.isolation_class);
      setMeter(flying, one.in_flight / one.concurrency, `${count(one.in_flight)} of ${count(one.concurrency)}`);
      setNumber(row[3], one.output_tokens_per_s, rate);
      setNumber(row[4], one.requests_per_s, rate);
      setNumber(row[5], one.refused_per_s, rate);
      setAttribute(row[5], "data-some", one.refused_per_s > 0);
      const tokens = one.tokens_left ?? one.tokens_per_minute;
      setMeter(left, 1 - tokens / one.tokens_per_minute, `${short(tokens)} of ${short(one.tokens_per_minute)}`);
      setNumber(row[7], one.kv_blocks, count);
      setNumber(row[8], one.tokens, short);
      setLimits(limits, one);
    },
  };
}

function setLimits(limits, one) {
  const requests = one.requests_left ?? one.requests_per_minute;
  const kv = one.kv_reserved === 0 && one.kv_cap === 1 ? "no reservation, no cap"
    : `${percent(one.kv_reserved)} reserved, at most ${percent(one.kv_cap)}`;
  const facts = [["Class", one.isolation_class], ["Priority", `${one.priority}, weight ${one.weight}`],
    ["Retention", one.retention], ["Sharing group", one.group ?? "none"],
    ["Requests a minute", `${count(one.requests_per_minute)}, ${count(requests)} left`],
    ["Tokens a minute", count(one.tokens_per_minute)], ["Context", counted(one.max_context_tokens, "token")],
    ["Output", counted(one.max_output_tokens, "token")], ["KV", kv],
    ["Since the start", `${counted(one.requests, "request")}, ${count(one.refused)} refused, ${counted(one.tokens, "token")}`]];
  if (!limits.firstChild) {
    limits.append(...facts.map(([title]) => make("div", {}, make("dt", {}, title), make("dd", {}))));
  }
  facts.forEach(([, value], index) => setText(limits.children[index].lastChild, value));
}

let order = new Map(); // Places of the rows at work.
let ordered = 0; // Since when, in seconds of the gateway's life.

/** The same tenants at work keep their places for a while: rows that swap each second cannot be read. */
function settle(rows, busy, now) {
  const first = rows.slice(0, busy);
  const same = first.length === order.size && first.every((one) => order.has(one.id));
  if (same && now >= ordered && now - ordered < STILL_S) {
    return [...first.sort((one, other) => order.get(one.id) - order.get(other.id)), ...rows.slice(busy)];
  }
  order = new Map(first.map((one, index) => [one.id, index]));
  ordered = now;
  return rows;
}

/** Show a page of tenants. */
export function showTenants(picture) {
  const tenants = picture.tenants;
  page.offset = tenants.offset;
  list.show(settle(tenants.rows, page.find ? 0 : Math.max(0, tenants.active - tenants.offset), picture.load.up_s));
  byId("tenants").closest(".scroll").hidden = tenants.rows.length === 0;
  byId("tenants-empty").hidden = tenants.rows.length > 0;
  const last = tenants.offset + tenants.rows.length;
  const many = tenants.matching > PAGE;
  const which = many ? `${count(tenants.offset + 1)} to ${count(last)} of ${count(tenants.matching)}` : counted(tenants.matching, "tenant");
  setText(byId("tenants-note"), `${which}${page.find ? " found" : ""}; ${count(tenants.active)} at work, these first, by tokens a second; sorted anew every ${STILL_S} s.`);
  byId("earlier").disabled = tenants.offset === 0;
  byId("later").disabled = last >= tenants.matching;
  for (const name of ["earlier", "later"]) byId(name).hidden = !many;
}

/** The search field and the buttons; `again` asks the gateway at once. */
export function startTenants(again) {
  let timer = 0;
  byId("find").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      page.find = event.target.value.trim();
      page.offset = 0;
      again();
    }, QUIET_MS);
  });
  byId("earlier").addEventListener("click", () => move(-PAGE));
  byId("later").addEventListener("click", () => move(PAGE));
  function move(by) {
    page.offset = Math.max(0, page.offset + by);
    again();
  }
}
