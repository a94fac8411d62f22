// KV memory: every cell is as many blocks as its caption says, coloured by whose content it holds.
//
// The map is proportional, not an address map. A tenant keeps its place and its colour as long as the page is open, so
// that what moves is memory and not the picture.

import { byId, Keyed, make, makeSvg, setAttribute, setText } from "./dom.js";
import { count, counted, percent } from "./format.js";

const MOST_CELLS = 480;
const COLUMNS = 60;
const NARROW = 30;
const CELL = 10;
const GAP = 2;
const SLOTS = 8;
const KINDS = { tenant: "private", group: "group", public: "public" };
const narrow = window.matchMedia("(max-width: 560px)");

/** Which colour an account has; given once, taken back when the account is gone and the colour is wanted. */
class Slots {
  constructor() {
    this.names = new Array(SLOTS).fill(null);
  }

  of(accounts) {
    const present = new Set(accounts.map((account) => account.name));
    for (const { name } of accounts) {
      if (this.names.includes(name)) continue;
      let free = this.names.indexOf(null);
      if (free < 0) free = this.names.findIndex((held) => !present.has(held));
      if (free >= 0) this.names[free] = name;
    }
    return (name) => this.names.indexOf(name);
  }
}

class PoolMap {
  constructor(model) {
    this.slots = new Slots();
    this.cells = [];
    this.shape = "";
    this.title = make("h3", {});
    this.caption = make("p", { class: "small" });
    this.svg = makeSvg("svg", { class: "map", role: "img" });
    this.legend = make("tbody", {});
    this.rows = new Keyed(this.legend, (row) => row.key, legendRow);
    this.waits = make("p", { class: "empty" }, "The engine is not there: it has no memory yet.");
    this.table = make("table", { class: "rows legend" },
      make("thead", {}, make("tr", {}, head("Whose", ""), head("In use", "num w5"), head("Cached", "num w5"), head("Reserved", "num wide w5"), head("Share", "num w5"))),
      this.legend);
    this.node = make("div", { class: "pool" }, this.title, this.waits, this.svg, this.caption, this.table);
    this.update(model);
  }

  update(model) {
    setText(this.title, model.tenant ? `${model.name}, own of ${model.tenant}` : model.name);
    const kv = model.kv;
    for (const part of [this.svg, this.caption, this.table]) part.toggleAttribute("hidden", !kv);
    this.waits.hidden = Boolean(kv);
    if (!kv) return;
    const parts = split(kv, this.slots.of(kv.accounts));
    const size = Math.max(1, Math.ceil(kv.blocks / MOST_CELLS));
    this.draw(paint(parts, kv.blocks, size), size);
    const held = kv.blocks - kv.free;
    const words = `${count(held)} of ${count(kv.blocks)} blocks in use, ${count(kv.free)} free, ${count(kv.cached)} of these cached`;
    setAttribute(this.svg, "aria-label", `${words}; the table below says whose`);
    setText(this.caption, `${words}; accounts are told once a second. A block is ${counted(kv.block_tokens, "token")}; a cell is ${counted(size, "block")}.`);
    this.rows.show(legendOf(parts, kv));
  }

  draw(classes) {
    const columns = narrow.matches ? NARROW : COLUMNS;
    const shape = `${classes.length}x${columns}`;
    if (this.shape !== shape) {
      this.shape = shape;
      const height = Math.ceil(classes.length / columns);
      setAttribute(this.svg, "viewBox", `0 0 ${columns * (CELL + GAP) - GAP} ${height * (CELL + GAP) - GAP}`);
      this.cells = classes.map((_, index) => makeSvg("rect", {
        x: (index % columns) * (CELL + GAP), y: Math.floor(index / columns) * (CELL + GAP), width: CELL, height: CELL, rx: 2 }));
      this.svg.replaceChildren(...this.cells);
    }
    classes.forEach((name, index) => setAttribute(this.cells[index], "class", name));
  }
}

const head = (text, name) => make("th", { scope: "col", class: name }, text);

/** The pool's parts in the order in which they are drawn: accounts by colour, then the others, then nobody's. */
function split(kv, slotOf) {
  const parts = kv.accounts
    .map((account) => ({ ...account, slot: slotOf(account.name) }))
    .sort((one, other) => one.slot - other.slot);
  if (kv.other_accounts) {
    parts.push({ name: counted(kv.other_accounts, "other account"), kind: "other", slot: -1,
      held: kv.other_held, cached: kv.other_cached, reserved: 0 });
  }
  const told = parts.reduce((sum, part) => sum + part.held, 0);
  const taken = Math.max(0, kv.blocks - kv.free);
  if (!parts.length && taken) {
    parts.push({ name: "not told yet", kind: "other", slot: -1, held: taken - told, cached: 0, reserved: 0 });
  }
  return parts;
}

/** A class name for each cell. Who has a block at all is seen: at least one cell. */
function paint(parts, blocks, size) {
  const total = Math.min(blocks, Math.ceil(blocks / size));
  const names = [];
  for (const part of parts) {
    const colour = `${part.kind === "other" ? "other" : `c${part.slot}`} ${KINDS[part.kind] || ""}`.trim();
    for (const [number, state] of [[part.held, "held"], [part.cached, "cached"]]) {
      const cells = number ? Math.max(1, Math.round(number / size)) : 0;
      for (let cell = 0; cell < cells && names.length < total; cell += 1) names.push(`${colour} ${state}`);
    }
  }
  while (names.length < total) names.push("free");
  return names;
}

/** Shares add up to the whole pool: of accounts what is in use, and what is free, where cached blocks are free too. */
function legendOf(parts, kv) {
  const rows = parts.map((part) => ({ key: part.name, part, blocks: kv.blocks }));
  const free = { name: "free", kind: "free", slot: -1, held: null, cached: null, reserved: null, free: kv.free };
  return [...rows, { key: " free", part: free, blocks: kv.blocks }];
}

function legendRow() {
  const swatch = makeSvg("rect", { x: 1, y: 1, width: 10, height: 10, rx: 2 });
  const name = make("span", { class: "name" });
  const kind = make("span", { class: "tag" });
  const numbers = ["num", "num", "num wide", "num"].map((className) => make("td", { class: className }));
  const picture = makeSvg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" }, swatch);
  const node = make("tr", {}, make("th", { scope: "row" }, picture, name, kind), ...numbers);
  return {
    node,
    update({ part, blocks }) {
      const free = part.kind === "free";
      setAttribute(swatch, "class", free ? "free" : `${part.kind === "other" ? "other" : `c${part.slot}`} ${KINDS[part.kind] || ""} held`);
      setText(name, part.kind === "tenant" || free || part.kind === "other" ? part.name : part.name.slice(part.name.indexOf("/") + 1));
      setText(kind, part.kind === "group" || part.kind === "public" ? part.kind : "");
      kind.hidden = !kind.textContent;
      const values = free ? ["", "", "", percent(part.free / blocks)]
        : [count(part.held), count(part.cached), part.reserved ? count(part.reserved) : "\u2013", percent(part.held / blocks)];
      values.forEach((value, index) => setText(numbers[index], value));
    },
  };
}

const pools = new Keyed(byId("kv"), (model) => `${model.name}/${model.tenant}`, (model) => {
  const map = new PoolMap(model);
  return { node: map.node, update: (one) => map.update(one) };
});

/** Draw the pool of each engine. */
export function showKv(picture) {
  pools.show([...picture.models, ...picture.own.filter((model) => model.kv)]);
}
