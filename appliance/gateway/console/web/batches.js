// Batches that are not over, those that have stood still longest first; nothing where no files are kept.

import { byId, Keyed, make, setAttribute, setText } from "./dom.js";
import { age, bytes, count, counted, DASH } from "./format.js";

const STUCK_S = 900;
const COLUMNS = 4;

const REASONS = {
  "": "lines run",
  validating: "file is read",
  ending: "lines end",
  drained: "appliance is drained",
  enough: "as many lines run as may",
  limit: "other requests use half of a limit",
  storage: "tenant keeps as much as it may",
  model: "model is not ready",
  busy: "requests wait in the engine",
  delayed: "last line was refused for now",
  turn: "others have their turn",
};

const MOVING = new Set(["", "validating", "ending", "enough"]); // What is as it should be.

const list = new Keyed(byId("batches"), (batch) => batch.id, () => {
  const name = make("span", { class: "name" });
  const model = make("span", { class: "tag" });
  const state = make("div", {}, make("span", { class: "dot", "aria-hidden": "true" }), make("span", {}));
  const [lines, running, still] = ["num", "num", "num mid"].map((name) => make("td", { class: name }));
  const node = make("tr", {}, make("th", { scope: "row", class: "owner" }, name, model), lines, running, still);
  return {
    node,
    extra: make("tr", { class: "detail under" }, make("td", { colspan: COLUMNS }, state)),
    update(batch) {
      const stuck = batch.still_s >= STUCK_S;
      setText(name, batch.tenant);
      setText(model, batch.model || batch.endpoint);
      setAttribute(node, "title", batch.id);
      setAttribute(state, "class", `state ${stuck ? "degraded" : MOVING.has(batch.obstacle) ? "well" : "quiet"}`);
      setText(state.lastChild, REASONS[batch.obstacle] ?? batch.obstacle);
      setText(lines, `${count(batch.total - batch.ended)} of ${count(batch.total)}`);
      setText(running, count(batch.running));
      setText(still, age(batch.still_s));
    },
  };
});

/** A row for each batch that is shown, and a line for all of them. */
export function showBatches(picture) {
  const queue = picture.batches;
  byId("batches-part").hidden = queue === null;
  if (queue === null) return;
  byId("batches-table").hidden = queue.rows.length === 0;
  list.show(queue.rows);
  const more = queue.open - queue.rows.length;
  const oldest = queue.open ? `, the oldest ${age(queue.oldest_s)} old` : "";
  const left = queue.open ? `${counted(queue.waiting_lines, "line")} left, ${count(queue.running_lines)} running${oldest}. ` : "";
  const names = more > 0 ? `${count(more)} more are not shown. ` : "";
  setText(byId("batches-note"), `${queue.open ? left : "No batch is open. "}${names}${counted(queue.files, "file")}: `
    + `${bytes(queue.stored_bytes)} of ${queue.max_bytes ? bytes(queue.max_bytes) : DASH}, stored responses included.`);
}
