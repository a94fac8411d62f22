// GPUs that models use, as the supervisor reads them from the driver; nothing where no model has one.

import { byId, Keyed, make, setAttribute, setText } from "./dom.js";
import { DASH, percent } from "./format.js";

const GIB = 2 ** 30;

const list = new Keyed(byId("gpus"), (card) => String(card.index), () => {
  const name = make("span", { class: "name" });
  const models = make("span", { class: "tag" });
  const state = make("td", {}, make("span", { class: "dot", "aria-hidden": "true" }), make("span", {}));
  const [busy, memory, heat, power] = ["num", "num", "num", "num mid"].map((name) => make("td", { class: name }));
  const node = make("tr", {}, make("th", { scope: "row" }, name, models), state, busy, memory, heat, power);
  return {
    node,
    update(card) {
      const told = card.figures;
      setText(name, String(card.index));
      setText(models, card.engines.join(", "));
      setAttribute(state, "class", `state ${level(card)}`);
      setText(state.lastChild, card.state === "ok" && card.out ? "no engine" : card.state);
      setAttribute(state, "title", card.out);
      setText(busy, told.busy_percent === undefined ? DASH : percent(told.busy_percent / 100));
      setText(memory, told.memory_total_bytes === undefined ? DASH
        : `${(told.memory_used_bytes / GIB).toFixed(0)} of ${(told.memory_total_bytes / GIB).toFixed(0)} GiB`);
      setText(heat, told.temperature_c === undefined ? DASH : `${told.temperature_c} \u00b0C`);
      setText(power, told.power_mw === undefined ? DASH : `${Math.round(told.power_mw / 1000)} W`);
    },
  };
});

function level(card) {
  if (card.state !== "ok") return "broken";
  return card.out || card.figures.ecc_uncorrected || card.figures.remap_pending || card.figures.remap_failed ? "degraded" : "well";
}

/** A row for each card that a model has. */
export function showGpus(picture) {
  byId("gpus-part").hidden = picture.cards.length === 0;
  list.show(picture.cards);
}
