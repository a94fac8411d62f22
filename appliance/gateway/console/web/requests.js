// The last requests; each opens into its waterfall.

import { byId, cells, Keyed, make, setAttribute, setText } from "./dom.js";
import { count, counted, DASH, duration, moment, rate } from "./format.js";
import { waterfall } from "./waterfall.js";

const COLUMNS = 11;
const AT_ONCE_S = 0.001;
const LEVELS = { ok: "well", refused: "degraded", invalid: "degraded", cancelled: "quiet", failed: "broken" };
const OUTCOMES = [["", "All"], ["failed", "Failed"], ["refused", "Refused"], ["invalid", "Invalid"], ["cancelled", "Cancelled"], ["ok", "Answered"]];

export const filter = { outcome: "", mark: "" };

const list = new Keyed(byId("requests"), (one) => one.request_id, build);
let opened = 0;
let now = 0; // The gateway's wall clock, for labels.

function build(one) {
  const id = one.request_id;
  const detail = make("td", { colspan: COLUMNS });
  const extra = make("tr", { class: "detail", hidden: true, id: `r-${id}` }, detail);
  const button = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": `r-${id}`,
    onclick: () => toggle(id, button, extra, detail) }, id.replace(/^req_/, "").slice(0, 8));
  const row = cells([["th", ""], ["td", "mid"], ["td", "text"], ["td", "text wide"], ["td", ""], ["td", "num wide"], ["td", "num wide"],
    ["td", "num"], ["td", "num wide"], ["td", "num wide"], ["td", "num"]]);
  row[0].append(button);
  const node = make("tr", {}, ...row);
  const texts = [moment(one.started_ns / 1e9 + one.duration_s, now), one.tenant ?? DASH, one.model ?? DASH, one.error ?? one.outcome,
    count(one.input_tokens), count(one.cached_tokens), count(one.output_tokens), duration(one.ttft_s),
    speed(one), duration(one.duration_s)];
  texts.forEach((text, index) => setText(row[index + 1], text));
  setAttribute(row[4], "class", `state ${LEVELS[one.outcome] ?? "quiet"}`);
  row.forEach((cell) => setAttribute(cell, "data-none", cell.textContent === "0" || cell.textContent === DASH));
  row[4].prepend(make("span", { class: "dot", "aria-hidden": "true" }));
  return { node, extra, update() {} }; // What has ended does not change.
}

function speed(one) {
  if (one.token_s === null) return DASH;
  // What came in one piece, because streams are handed on together on a busy machine, has no rate.
  return one.token_s * (one.output_tokens - 1) < AT_ONCE_S ? "at once" : rate(1 / one.token_s);
}

async function toggle(id, button, row, place) {
  const open = row.hidden;
  row.hidden = !open;
  opened += open ? 1 : -1;
  setAttribute(button, "aria-expanded", open ? "true" : "false");
  if (!open || place.firstChild) return;
  place.append(make("p", { class: "empty" }, "Loading"));
  try {
    const answer = await fetch(`requests/${encodeURIComponent(id)}`, { cache: "no-store" });
    const body = await answer.json();
    place.replaceChildren(answer.ok ? waterfall(body) : make("p", { class: "empty" }, body.error.message));
  } catch {
    place.replaceChildren();
    row.hidden = true;
    opened -= 1;
    setAttribute(button, "aria-expanded", "false");
  }
}

/** Whether somebody is at a row: what moves away under a pointer cannot be opened. */
function held() {
  const body = byId("requests");
  return opened > 0 || body.matches(":hover") || body.contains(document.activeElement);
}

/** Show the newest requests, where they are others than before. While somebody is at one the list stands still. */
export function showRequests(picture) {
  const requests = picture.requests;
  if (!requests) return;
  const before = filter.mark;
  if (before && before.split("/")[1] === filter.outcome && held()) {
    setText(byId("requests-note"), "The list stands still while a request is open or pointed at.");
    return;
  }
  filter.mark = requests.mark;
  now = picture.now;
  opened = 0;
  list.show(requests.rows);
  const empty = byId("requests-empty");
  empty.hidden = requests.rows.length > 0;
  setText(empty, filter.outcome ? `None of the last ${counted(requests.kept, "request")} ended like this.`
    : "No request has ended yet. The first one is shown here a moment after its answer.");
  byId("requests").closest(".scroll").hidden = requests.rows.length === 0;
  setText(byId("requests-note"), requests.recorded
    ? `${counted(requests.recorded, "request")} since the start; the last ${count(requests.kept)} can be looked at.` : "");
}

/** Forget what came from another life of the gateway. */
export function forget() {
  filter.mark = "";
  opened = 0;
  list.show([]);
}

/** The buttons that choose by outcome; `again` asks the gateway at once. */
export function startRequests(again) {
  const buttons = OUTCOMES.map(([outcome, title]) => make("button", { type: "button", "aria-pressed": String(!outcome),
    onclick: () => choose(outcome) }, title));
  byId("outcomes").append(...buttons);
  function choose(outcome) {
    filter.outcome = outcome;
    buttons.forEach((button, index) => setAttribute(button, "aria-pressed", String(OUTCOMES[index][0] === outcome)));
    forget();
    again();
  }
}
