// The last ten minutes as a small chart: time runs to the right edge, which is now.

import { make, makeSvg, setAttribute, setText } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;

/** `series` are class names, drawn in their order; the first one is filled. `say` makes a sentence for who cannot see it. */
export class Spark {
  constructor(parent, series, span, say) {
    this.span = span;
    this.say = say;
    this.lines = series.map((name) => makeSvg("path", { class: `line ${name}` }));
    this.area = makeSvg("path", { class: `area ${series[0]}` });
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, ...this.lines);
    this.top = make("span", {});
    parent.append(this.svg, make("div", { class: "axis", "aria-hidden": "true" }, make("span", {}, "10 min ago"), this.top, make("span", {}, "now")));
  }

  /** `points` are `[at, value, value...]` in order of time. */
  show(points, now) {
    const inside = points.filter(([at]) => at >= now - this.span);
    const most = Math.max(1e-9, ...inside.flatMap(([, ...values]) => values));
    const x = (at) => (WIDTH * (1 - (now - at) / this.span)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 6) * (value / most)).toFixed(1);
    this.lines.forEach((line, index) => {
      const path = inside.map((point, step) => `${step ? "L" : "M"}${x(point[0])} ${y(point[index + 1])}`).join("");
      const some = index === 0 || inside.some((point) => point[index + 1] > 0);
      setAttribute(line, "d", inside.length > 1 && some ? path : "");
      if (index === 0) {
        const closed = inside.length > 1 ? `${path}L${x(inside.at(-1)[0])} ${HEIGHT}L${x(inside[0][0])} ${HEIGHT}Z` : "";
        setAttribute(this.area, "d", closed);
      }
    });
    const sentence = this.say(inside, most > 1e-6 ? most : 0);
    setAttribute(this.svg, "aria-label", sentence);
    setText(this.top, sentence);
  }
}
