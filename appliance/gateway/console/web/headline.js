// The tiles: tokens a second, requests in engines, percentiles.

import { byId, make, setAttribute, setText } from "./dom.js";
import { age, count, counted, DASH, duration, rate } from "./format.js";
import { Spark } from "./spark.js";

const SPAN_S = 600;

const tokenSpark = new Spark(byId("tokens-spark"), ["tokens"], SPAN_S, (_, most) => `peak ${rate(most)}`);
const queueSpark = new Spark(byId("queue-spark"), ["running", "waiting"], SPAN_S, (points) => {
  const most = Math.max(0, ...points.map((point) => point[1]));
  return `peak ${count(most)} running, ${count(Math.max(0, ...points.map((point) => point[2])))} waiting`;
});
const rows = ["First token", "Each token", "Whole answer"].map((title) => {
  const numbers = [0, 1, 2].map(() => make("td", { class: "num" }));
  byId("latency").append(make("tr", {}, make("th", { scope: "row" }, title), ...numbers));
  return numbers;
});

let points = [];

/** Forget what came from another life of the gateway. */
export function forget() {
  points = [];
}

/** The moment of the newest point that is known, in seconds of the gateway's life: nobody sets that clock. */
export const newest = () => (points.length ? points.at(-1).at : 0);

export function showHeadline(picture) {
  points = [...points, ...picture.points].slice(-Math.ceil(SPAN_S / picture.period_s) - 1);
  showTokens(picture);
  const { running, waiting, up_s: now } = picture.load;
  setText(byId("running-now"), count(running));
  setText(byId("waiting-now"), count(waiting));
  setAttribute(byId("waiting-now"), "data-some", waiting > 0);
  const flying = picture.tenants.active;
  setText(byId("queue-note"), flying ? `${counted(flying, "tenant")} at work` : "no tenant at work");
  queueSpark.show(points.map((point) => [point.at, point.running, point.waiting]), now);
  showLatency(picture.latency);
}

function showTokens(picture) {
  const { counts, rates: lately, up_s: now } = picture.load;
  setText(byId("tokens-now"), rate(lately.output_tokens));
  const over = lately.over_s ? `over ${Math.round(lately.over_s)} s; ` : "";
  setText(byId("tokens-note"), `${over}${count(counts.output_tokens)} since the start`);
  const rates = points.slice(1).map((point, index) => {
    const before = points[index];
    return [point.at, Math.max(0, point.tokens - before.tokens) / Math.max(0.1, point.at - before.at)];
  });
  tokenSpark.show(rates, now);
}

function showLatency(latency) {
  [latency.first_token, latency.each_token, latency.total].forEach((spread, index) => {
    ["p50", "p90", "p99"].forEach((name, place) => {
      setText(rows[index][place], spread ? duration(spread[name]) : DASH);
    });
  });
  const text = latency.requests
    ? `${counted(latency.requests, "answered request")} of the last ${age(Math.ceil(latency.window_s / 60) * 60)}`
    : "no request was answered in the last 15 minutes";
  setText(byId("latency-note"), text);
}
