// The page of usage: a look each quarter of a minute while somebody reads it, and at once for another time.

import { byId, Keyed, make, setAttribute, setStyle, setText } from "./dom.js";
import { count, counted, percent, short } from "./format.js";
import { contact, live } from "./head.js";
import { dateOf, dayName, hourName, money, units } from "./money.js";
import { MEASURES, Plot } from "./plot.js";
import { Poll } from "./poll.js";
import { startTheme } from "./theme.js";
import { forget, page, showRows } from "./usagerows.js";

const PERIOD_MS = 15000;
const PATIENCE_MS = 70000; // The supervisor may read a large book.
const QUIET_MS = 250; // After the last key of a word that is searched for.
const SPANS = [["today", "Today"], ["7d", "7 days"], ["30d", "30 days"]];
const DAY_S = 86400;

const plot = new Plot(byId("plot"));
let last = null;
let measure = null; // What the reader has chosen to see in the plot.

const unusual = new Keyed(byId("unusual"), (one) => one.tenant, () => {
  const what = make("strong", {});
  const line = make("span", {});
  const command = make("code", {});
  return {
    node: make("li", { class: "alert degraded" }, make("span", { class: "mark", "aria-hidden": "true" }, "!"),
      make("div", {}, make("p", { class: "what" }, what), make("p", { class: "line" }, make("b", {}, "Hour"), line),
        make("p", { class: "line" }, make("b", {}, "Do"), make("span", {}, command)))),
    update(one) {
      setText(what, `${one.tenant} sends ten times what is usual for it, or more`);
      setText(line, `${counted(one.requests, "request")} in an hour, usually ${count(one.usual_requests)}; ${short(one.tokens)} tokens, usually ${short(one.usual_tokens)}`);
      setText(command, `athanor usage --by day,model --tenant ${one.tenant} --since 14d`);
    },
  };
});

function ask() {
  return new URLSearchParams({ span: page.span, find: page.find, offset: page.offset });
}

function told(look) {
  if (look.span !== page.span) return;
  last = look;
  setAttribute(byId("whole"), "aria-busy", null);
  live(look);
  byId("problem").hidden = true;
  byId("whole").hidden = false;
  showSpan(look);
  byId("unusual-part").hidden = look.unusual.length === 0;
  unusual.show(look.unusual);
  showTiles(look);
  showPlot();
  showRows(look);
}

function lost(reason, refused) {
  setAttribute(byId("whole"), "aria-busy", null);
  contact("lost", refused ? "no answer" : "no contact");
  setText(byId("problem-text"), refused ? `Usage cannot be shown: ${reason}.` : `No contact with the gateway: ${reason}.`);
  byId("problem").hidden = false;
}

function showSpan(look) {
  const days = look.span === "today" ? `${dayName(look.since)}, 00:00` : `${dayName(look.since)}, 00:00, to ${dayName(look.now)},`;
  setText(byId("span-note"), `${days}${look.span === "today" ? " to" : ""} ${hourName(look.now)} UTC`);
  setAttribute(byId("download"), "href", `usage.csv?${new URLSearchParams({ span: look.span, find: page.find })}`);
  setText(byId("foot"), `athanor usage --since ${dateOf(look.since)} --by tenant`);
}

function bar(part, share, label) {
  const track = part.firstChild ?? part.appendChild(make("div", { class: "track", role: "img" }, make("span", {})));
  setStyle(track.firstChild, "width", `${(100 * share).toFixed(1)}%`);
  setAttribute(track, "aria-label", label);
}

function showTiles(look) {
  const { total, machine } = look;
  setText(byId("cost"), look.priced ? money(total.cost) : "none");
  setText(byId("cost-unit"), look.priced ? look.currency : "");
  setText(byId("cost-note"), look.priced ? `${counted(total.requests, "request")}, at the policy's prices of their time`
    : `${counted(total.requests, "request")}; the policy has no prices`);
  const cached = total.input ? total.cached / total.input : 0;
  setText(byId("input"), short(total.input));
  setText(byId("input-note"), `${percent(cached)} cached: ${short(total.cached)}`);
  bar(byId("input-share"), cached, `${percent(cached)} of the input was cached`);
  const thought = total.output ? total.reasoning / total.output : 0;
  setText(byId("output"), short(total.output));
  setText(byId("output-note"), `${percent(thought)} reasoning: ${short(total.reasoning)}`);
  bar(byId("output-share"), thought, `${percent(thought)} of the output is reasoning`);
  setText(byId("machine"), machine ? units(machine.cost) : "unknown");
  setText(byId("machine-unit"), machine ? machine.currency : "");
  const each = machine && total.output ? `; ${units((machine.cost * 1e6) / total.output)} per million output tokens` : "";
  setText(byId("machine-note"), machine ? `${machine.hours.toFixed(1)} h at ${units(machine.price_per_hour)}${each}` : "athanor.yaml has no price of an hour");
}

function showPlot() {
  const chosen = measure ?? (last.priced ? 2 : 1);
  [...byId("measures").children].forEach((button, index) => {
    setAttribute(button, "aria-pressed", String(index === chosen));
    button.hidden = index === 2 && !last.priced;
  });
  setText(byId("h-plot"), `${MEASURES[chosen]} by model, each ${last.step_s < DAY_S ? "hour" : "day"}`);
  plot.show(last, chosen);
}

const poll = new Poll("usage", ask, told, lost, { period: PERIOD_MS, patience: PATIENCE_MS });

function again() {
  setAttribute(byId("whole"), "aria-busy", "true");
  poll.now();
}

function choose(span) {
  page.span = span;
  page.offset = 0;
  [...byId("spans").children].forEach((button, index) => setAttribute(button, "aria-pressed", String(SPANS[index][0] === span)));
  history.replaceState(null, "", `#${span}`);
  plot.at = null;
  forget();
  again();
}

function move(by) {
  page.offset = Math.max(0, page.offset + by);
  again();
}

startTheme();
byId("spans").append(...SPANS.map(([span, title]) => make("button", { type: "button", "aria-pressed": "false", onclick: () => choose(span) }, title)));
byId("measures").append(...MEASURES.map((title, index) => make("button", { type: "button", "aria-pressed": "false", onclick: () => {
  measure = index;
  showPlot();
} }, title)));
byId("earlier").addEventListener("click", () => move(-page.rows));
byId("later").addEventListener("click", () => move(page.rows));
let timer = 0;
byId("find").addEventListener("input", (event) => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    page.find = event.target.value.trim();
    page.offset = 0;
    again();
  }, QUIET_MS);
});
const wanted = SPANS.find(([span]) => `#${span}` === location.hash);
choose(wanted ? wanted[0] : "today");
