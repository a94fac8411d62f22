// Bars of a time, stacked by model. The numbers of one bar are read under the plot: by pointer, or by arrow keys.

import { make, makeSvg, setAttribute, setStyle, setText } from "./dom.js";
import { count, short } from "./format.js";
import { dayName, decimals, hourName, mark, money } from "./money.js";

const WIDTH = 1000;
const HEIGHT = 200;
const DAY_S = 86400;
const LINES = 4; // Parts of the scale.
export const MEASURES = ["Requests", "Tokens", "Cost"];

/** The next round number: 1, 2, 2.5 or 5 times a power of ten. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

export class Plot {
  constructor(parent) {
    this.ys = make("div", { class: "ys", "aria-hidden": "true" });
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.field = make("div", { class: "field", role: "slider", tabindex: "0", "aria-label": "Bars of the plot", onpointermove: (event) => this.point(event),
      onpointerleave: () => this.choose(null), onkeydown: (event) => this.key(event), onblur: () => this.choose(null) }, this.svg);
    this.xs = make("div", { class: "xs", "aria-hidden": "true" });
    this.legend = make("ul", { class: "key" });
    this.at = null;
    parent.append(make("div", { class: "plot" }, this.ys, this.field, this.xs), this.legend);
  }

  /** `steps` has three numbers for each step by model; `measure` is which of them is drawn. */
  show({ steps, since, step_s: step, until, currency }, measure) {
    this.names = Object.keys(steps);
    this.values = this.names.map((name) => steps[name].filter((_, index) => index % MEASURES.length === measure));
    Object.assign(this, { since, step, until, measure, currency });
    this.number = this.values[0]?.length ?? 0;
    const sums = Array.from({ length: this.number }, (_, place) => this.values.reduce((sum, one) => sum + one[place], 0));
    this.most = roundUp(Math.max(...sums, 0));
    this.draw();
    this.label();
    this.choose(this.at !== null && this.at < this.number ? this.at : null);
  }

  draw() {
    const width = WIDTH / Math.max(1, this.number);
    const gap = Math.min(width * 0.18, 3);
    const parts = Array.from({ length: LINES }, (_, line) => {
      const y = HEIGHT - (HEIGHT * (line + 1)) / LINES + 0.5;
      return makeSvg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
    });
    this.columns = Array.from({ length: this.number }, (_, place) =>
      makeSvg("rect", { class: "column", x: (place * width).toFixed(2), y: 0, width: width.toFixed(2), height: HEIGHT }));
    parts.push(...this.columns);
    for (let place = 0; place < this.number; place += 1) {
      let y = HEIGHT;
      this.values.forEach((one, index) => {
        const height = (HEIGHT * one[place]) / this.most;
        y -= height;
        if (height > 0) {
          parts.push(makeSvg("rect", { class: this.colour(index), x: (place * width + gap / 2).toFixed(2), y: y.toFixed(2),
            width: (width - gap).toFixed(2), height: Math.max(height, 0.4).toFixed(2) }));
        }
      });
    }
    parts.push(makeSvg("line", { class: "grid base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }));
    this.svg.replaceChildren(...parts);
  }

  colour(index) {
    return this.names[index] === "" ? "other" : `c${index}`;
  }

  label() {
    const scale = Array.from({ length: LINES + 1 }, (_, line) => {
      const label = make("span", {}, this.axis((this.most * line) / LINES));
      setStyle(label, "top", `${100 - (100 * line) / LINES}%`);
      return label;
    });
    const widest = scale.map((one) => one.textContent).sort((one, other) => other.length - one.length)[0];
    this.ys.replaceChildren(make("span", { class: "widest" }, widest), ...scale);
    const whole = this.number * this.step;
    const every = whole <= DAY_S ? 3 * 3600 : whole <= 7 * DAY_S ? DAY_S : 5 * DAY_S;
    const marks = [];
    const middle = every < DAY_S ? 0 : DAY_S / 2;
    for (let at = 0; at < whole; at += every) {
      const mark = make("span", {}, every < DAY_S ? hourName(this.since + at) : dayName(this.since + at));
      setStyle(mark, "left", `${(100 * (at + middle)) / whole}%`);
      marks.push(mark);
    }
    this.xs.replaceChildren(...marks);
    setAttribute(this.field, "aria-valuemin", 0);
    setAttribute(this.field, "aria-valuemax", Math.max(0, this.number - 1));
  }

  axis(value) {
    if (this.measure === 2) return mark(value);
    return value < 10000 && value % 1 ? value.toFixed(1) : short(value).replace(/\.0+ /, " ");
  }

  text(value, places) {
    return this.measure === 2 ? `${money(value, places)} ${this.currency}`.trim() : count(value);
  }

  point(event) {
    const box = this.field.getBoundingClientRect();
    this.choose(Math.max(0, Math.min(this.number - 1, Math.floor(((event.clientX - box.left) / box.width) * this.number))));
  }

  key(event) {
    const last = Math.max(0, Math.min(this.number, Math.ceil((this.until - this.since) / this.step)) - 1);
    const from = this.at ?? last;
    const to = { ArrowLeft: this.at === null ? last : from - 1, ArrowRight: this.at === null ? last : from + 1, Home: 0, End: last }[event.key];
    if (to === undefined) {
      if (event.key === "Escape") this.choose(null);
      return;
    }
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.number - 1, to)));
  }

  /** Show one bar's numbers under the plot, or those of the whole time. */
  choose(place) {
    this.at = place;
    this.columns?.forEach((column, index) => setAttribute(column, "class", index === place ? "column at" : "column"));
    const amounts = this.values.map((one) => (place === null ? one.reduce((sum, value) => sum + value, 0) : one[place]));
    const all = amounts.reduce((sum, value) => sum + value, 0);
    const places = decimals(Math.max(...amounts, 0));
    const moment = place === null ? "In all" : this.moment(this.since + place * this.step);
    const items = this.names.map((name, index) => make("li", {}, this.swatch(index),
      make("span", { class: "name", title: name || "all others" }, name || "all others"), make("b", {}, this.text(amounts[index], places))));
    const head = make("li", { class: "moment" }, moment);
    this.legend.replaceChildren(head, ...items, ...(items.length > 1 ? [make("li", {}, "together", make("b", {}, this.text(all, places)))] : []));
    setAttribute(this.field, "aria-valuenow", place ?? 0);
    setAttribute(this.field, "aria-valuetext", `${moment}: ${this.text(all, places)}${this.measure === 2 ? "" : ` ${MEASURES[this.measure].toLowerCase()}`}`);
  }

  swatch(index) {
    return makeSvg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" },
      makeSvg("rect", { class: this.colour(index), x: 1, y: 1, width: 10, height: 10, rx: 2 }));
  }

  moment(at) {
    return this.step < DAY_S ? `${dayName(at)}, ${hourName(at)}` : dayName(at);
  }
}
