// Amounts of money: whole billionths of a unit come in, a number with its decimals goes out. All times here are UTC.

const BILLIONTHS = 1e9;

const formats = new Map();

function format(decimals) {
  if (!formats.has(decimals)) {
    formats.set(decimals, new Intl.NumberFormat("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
  }
  return formats.get(decimals);
}

/** How many decimals amounts beside each other need, the largest being this one: few for large ones, so that they align. */
export function decimals(largest) {
  const units = Math.abs(largest) / BILLIONTHS;
  return units >= 10 || units === 0 ? 2 : units >= 0.1 ? 4 : 6;
}

/** Billionths as units: 1,234.50. */
export function money(billionths, places = decimals(billionths)) {
  return format(places).format(billionths / BILLIONTHS);
}

/** Units as text, of prices that are not exact. */
export const units = (value) => money(value * BILLIONTHS, value === 0 || value >= 1 ? 2 : value >= 0.001 ? 4 : 6);

const short = new Intl.NumberFormat("en", { maximumFractionDigits: 9 });

/** Billionths as units with no more decimals than they need, of a scale: 20, 2.5. */
export const mark = (billionths) => short.format(billionths / BILLIONTHS);

const day = new Intl.DateTimeFormat("en-GB", { weekday: "short", day: "numeric", month: "short", timeZone: "UTC" });
const hour = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", timeZone: "UTC" });

/** Unix seconds as "Thu 26 Nov". */
export const dayName = (at) => day.format(new Date(at * 1000)).replace(",", "");

/** Unix seconds as "14:00". */
export const hourName = (at) => hour.format(new Date(at * 1000));

/** Unix seconds as "2026-11-26", which commands take. */
export const dateOf = (at) => new Date(at * 1000).toISOString().slice(0, 10);
