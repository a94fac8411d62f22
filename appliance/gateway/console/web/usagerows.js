// The tables of usage: tenants, which open into models and end users, models, classes, and limits of spend.

import { byId, cells, Keyed, make, setAttribute, setNumber, setStyle, setText } from "./dom.js";
import { count, counted, DASH, percent, short } from "./format.js";
import { decimals, money, units } from "./money.js";

const COLUMNS = 8;
const FULL = 0.95;
const MAX_MODELS = 12;

export const page = { offset: 0, find: "", span: "today", rows: 20 };

/** What all tables of one look share: whether there are prices, and the decimals of their amounts. */
let look = { priced: false, currency: "" };
let largest = { tenants: 1, models: 1 };
let places = { tenants: 2, models: 2, budgets: 2 };

const weight = (one) => (look.priced ? one.cost : one.input + one.output);
const worth = (one, digits) => (look.priced ? money(one.cost, digits) : short(one.input + one.output));

const tenants = new Keyed(byId("tenants"), (one) => one.name, buildTenant);
let rowNumber = 0;

function buildTenant(first) {
  const id = `u-${(rowNumber += 1)}`;
  const place = make("div", { class: "two" });
  const extra = make("tr", { class: "detail", hidden: true, id }, make("td", { colspan: COLUMNS }, place));
  const button = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": id, onclick: () => {
    extra.hidden = !extra.hidden;
    setAttribute(button, "aria-expanded", String(!extra.hidden));
    if (!extra.hidden) openTenant(first.name, place);
  } }, first.name);
  const row = cells([["th", "text"], ["td", "wide"], ["td", "num wide"], ["td", "num"], ["td", "num wide"], ["td", "num"],
    ["td", "num wide"], ["td", "num"]]);
  const words = make("span", {});
  const fill = make("span", {});
  row[0].append(button);
  row[7].append(make("span", { class: "amount" }, words, make("span", { class: "track" }, fill)));
  return {
    node: make("tr", {}, ...row),
    extra,
    update(one) {
      setText(row[1], one.isolation_class || "left");
      setAttribute(row[1], "data-none", !one.isolation_class);
      setNumber(row[2], one.requests, count);
      setNumber(row[3], one.input, short);
      setNumber(row[4], one.cached, short);
      setNumber(row[5], one.output, short);
      setNumber(row[6], one.reasoning, short);
      setText(words, worth(one, places.tenants));
      setStyle(fill, "width", `${Math.max(0, (100 * weight(one)) / largest.tenants).toFixed(1)}%`);
    },
  };
}

/** A part of what a tenant used, asked for now; `state` says what came of it. */
async function ask(kind, tenant) {
  const query = new URLSearchParams({ span: page.span, tenant });
  const answer = await fetch(`usage/${kind}?${query}`, { cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  return body;
}

async function openTenant(name, place) {
  const models = make("div", {}, make("h3", {}, "Models"));
  const users = make("div", {}, make("h3", {}, "End users"));
  place.replaceChildren(models, users);
  users.append(make("button", { type: "button", class: "plain", onclick: (event) => {
    event.target.remove();
    fillPart(users, "users", name);
  } }, "Show"));
  await fillPart(models, "models", name);
}

async function fillPart(part, kind, tenant) {
  const note = make("p", { class: "empty" }, "Loading");
  part.append(note);
  try {
    const found = await ask(kind, tenant);
    note.replaceWith(found.rows.length ? small(found.rows, kind) : make("p", { class: "empty" }, kind === "users"
      ? "No request of this time names an end user." : "Nothing was used."));
    const more = found.matching - found.rows.length;
    if (more > 0) part.append(make("p", { class: "small" }, `${count(more)} more: `, make("code", {}, `athanor usage --by ${kind === "users" ? "user" : "model"} --tenant ${tenant}`)));
  } catch (error) {
    setText(note, error instanceof TypeError ? "Nothing answers." : error.message);
  }
}

function small(rows, kind) {
  const digits = decimals(Math.max(...rows.map((one) => one.cost)));
  const titles = ["Requests", "Input", "Output", look.priced ? "Cost" : "Tokens"].map((title) => make("th", { scope: "col", class: "num" }, title));
  const lines = rows.map((one) => make("tr", {},
    make("th", { scope: "row", class: "text" }, make("span", { class: kind === "users" ? "name mono" : "name", title: one.name }, one.name)),
    ...[count(one.requests), short(one.input), short(one.output), worth(one, digits)].map((text) => make("td", { class: "num" }, text))));
  const first = make("th", { scope: "col" }, kind === "users" ? "Pseudonym" : "Model");
  return make("table", { class: "rows" }, make("thead", {}, make("tr", {}, first, ...titles)), make("tbody", {}, ...lines));
}

const models = new Keyed(byId("models"), (one) => one.name, () => {
  const name = make("span", { class: "name" });
  const row = cells([["th", "text"], ["td", "num mid"], ["td", "num"], ["td", "num"], ["td", "num"]]);
  row[0].append(name);
  return {
    node: make("tr", {}, ...row),
    update(one) {
      setText(name, one.name || "all others");
      setAttribute(name, "title", one.name || null);
      setNumber(row[1], one.input, short);
      setNumber(row[2], one.output, short);
      setText(row[3], look.priced ? money(one.cost, places.models) : count(one.requests));
      setText(row[4], one.host_per_million === null ? DASH : units(one.host_per_million));
      setAttribute(row[4], "data-none", one.host_per_million === null);
    },
  };
});

const classes = new Keyed(byId("classes"), (one) => one.name, () => {
  const row = cells([["th", ""], ["td", "num mid"], ["td", "num"], ["td", "num"], ["td", "num"]]);
  return {
    node: make("tr", {}, ...row),
    update(one) {
      setText(row[0], one.name || "tenants that left");
      setNumber(row[1], one.requests, count);
      setNumber(row[2], one.input, short);
      setNumber(row[3], one.output, short);
      setText(row[4], worth(one, places.models));
    },
  };
});

const budgets = new Keyed(byId("budgets"), (one) => one.tenant, () => {
  const name = make("span", { class: "name" });
  const period = make("span", { class: "tag" });
  const row = cells([["th", "owner"], ["td", "num"], ["td", "num mid"], ["td", "num"]]);
  const words = make("b", {});
  const spent = make("span", {});
  const held = make("span", { class: "held" });
  const limit = make("span", { class: "limit" }, words, make("span", { class: "track" }, spent, held));
  row[0].append(name, period);
  row[3].append(limit);
  return {
    node: make("tr", {}, ...row),
    update(one) {
      const part = (amount) => (one.limit ? Math.max(0, Math.min(1, amount / one.limit)) : 0);
      const used = one.limit ? (one.spent + one.reserved) / one.limit : 1;
      setText(name, one.tenant);
      setText(period, one.period === "day" ? "today" : "this month");
      setText(row[1], money(one.spent, places.budgets));
      setText(row[2], money(one.reserved, places.budgets));
      setAttribute(row[2], "data-none", !one.reserved);
      setText(words, `${percent(used)} of ${money(one.limit, places.budgets)}`);
      setAttribute(limit, "class", used >= FULL ? "limit full" : "limit");
      setStyle(spent, "width", `${(100 * part(one.spent)).toFixed(1)}%`);
      setStyle(held, "width", `${(100 * Math.min(part(one.reserved), 1 - part(one.spent))).toFixed(1)}%`);
    },
  };
});

/** Fill all tables from one look. */
export function showRows(told) {
  look = told;
  const most = (rows, of) => Math.max(1, ...rows.map(of));
  if (told.tenants.offset === 0 && !page.find) largest.tenants = most(told.tenants.rows, weight);
  places = { tenants: decimals(most(told.tenants.rows, (one) => one.cost)), models: decimals(most(told.models, (one) => one.cost)),
    budgets: decimals(most(told.budgets.rows, (one) => one.limit)) };
  for (const id of ["tenants-measure", "classes-cost"]) setText(byId(id), title("Tokens"));
  setText(byId("models-cost"), title("Requests"));
  const unit = told.machine?.currency ? `${told.machine.currency} ` : "";
  setText(byId("models-machine"), `Machine, ${unit}per 1 M output`);
  tenants.show(told.tenants.rows);
  models.show(told.models.slice(0, MAX_MODELS));
  classes.show(told.classes);
  budgets.show(told.budgets.rows);
  showNotes(told);
}

function title(otherwise) {
  return look.priced ? `Cost${look.currency ? `, ${look.currency}` : ""}` : otherwise;
}

function showNotes(told) {
  const { rows, offset, matching } = told.tenants;
  const last = offset + rows.length;
  const many = matching > rows.length;
  byId("tenants").closest(".scroll").hidden = rows.length === 0;
  byId("tenants-empty").hidden = rows.length > 0;
  setText(byId("tenants-empty"), page.find ? "No tenant that used something has this in its name." : "Nothing was used in this time.");
  const which = many && rows.length ? `${count(offset + 1)} to ${count(last)} of ${counted(matching, "tenant")}` : counted(matching, "tenant");
  setText(byId("tenants-note"), `${which}${page.find ? " found" : ""}, by ${told.priced ? "cost" : "tokens"}. Tokens that were cached are a part of the input, reasoning a part of the output.`);
  byId("earlier").disabled = offset === 0;
  byId("later").disabled = last >= matching;
  for (const name of ["earlier", "later"]) byId(name).hidden = !many;
  const hidden = told.models.length - MAX_MODELS;
  const others = hidden > 0 ? `${counted(hidden, "more row")} by athanor usage --by model. ` : "";
  setText(byId("models-note"), others + (told.machine
    ? "The machine's price is shared by computed tokens: input that was not cached, and output."
    : "No price of the machine: host: {price_per_hour: 2.5, currency: EUR} in athanor.yaml gives its cost per million output tokens."));
  const limited = told.budgets.matching;
  byId("budgets-table").hidden = limited === 0;
  const shown = limited > told.budgets.rows.length ? `The ${told.budgets.rows.length} with the least left of ${counted(limited, "tenant")}, each` : "Each tenant";
  setText(byId("budgets-note"), limited ? `${shown} by the limit of which less is left, that of the day or of the month (UTC). Reserved: the most that running requests may cost.`
    : page.find ? "No tenant with this in its name has a limit of spend." : "No tenant has a limit of spend (spend_per_day, spend_per_month).");
}

/** Forget what is open: it was of another time. */
export function forget() {
  tenants.show([]);
}
