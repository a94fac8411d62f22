// Numbers as people read them; the command line writes them the same way.

export const DASH = "\u2013";

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number with groups: 12,345. */
export function count(number) {
  return number === null || number === undefined ? DASH : grouped.format(number);
}

/** "1 request", "2 requests". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function three(value) {
  if (value < 9.995) return value.toFixed(2);
  return value < 99.95 ? value.toFixed(1) : value.toFixed(0);
}

/** Three digits and a unit: 0.21 ms, 842 ms, 1.84 s, 2 min 05 s, 3 h 07 min, 2 d 04 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 0.9995) return `${three(seconds * 1000)} ms`;
  if (seconds < 100) return `${three(seconds)} s`;
  return long(seconds);
}

/** The same without fractions, for what ticks: 7 s, 2 min 05 s. */
export function age(seconds) {
  return seconds < 100 ? `${Math.max(0, Math.round(seconds))} s` : long(seconds);
}

function long(seconds) {
  const pad = (value) => String(value).padStart(2, "0");
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
  const hours = Math.floor(minutes / 60);
  return `${Math.floor(hours / 24)} d ${pad(hours % 24)} h`;
}

/** A rate: 0, 0.4, 12, 1,234. */
export function rate(value) {
  if (!value) return "0";
  return value < 9.95 ? value.toFixed(1) : grouped.format(value);
}

/** Many, shortly: 999, 12.3 k, 4.56 M. */
export function short(number) {
  if (number === null || number === undefined) return DASH;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= size) return `${three(number / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return count(number);
}

/** A share of 0 to 1: 34 %. */
export const percent = (share) => `${Math.round(100 * share)} %`;

const timeOfDay = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-CA", { year: "numeric", month: "2-digit", day: "2-digit" });

/** Unix seconds as local time of day, with the date when that is not today's; `now` is the gateway's, as `at` is. */
export function clock(at, now) {
  const moment = new Date(at * 1000);
  const today = day.format(new Date(now * 1000)) === day.format(moment);
  return today ? timeOfDay.format(moment) : `${day.format(moment)} ${timeOfDay.format(moment)}`;
}

const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** The same, shorter: 12:34:56, and "25 Nov 12:34" when that is not today. */
export function moment(at, now) {
  const shown = clock(at, now);
  return shown.includes(" ") ? date.format(new Date(at * 1000)).replace(",", "") : shown;
}

/** Bytes with a binary unit: 512 B, 64 KiB, 1.5 GiB. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let value = number;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${value < 10 && units[0] !== "B" ? value.toFixed(1) : grouped.format(value)} ${units[0]}`;
}
