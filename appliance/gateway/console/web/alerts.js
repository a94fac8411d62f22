// The strip on top: what is broken, who is affected, what to do.

import { byId, Keyed, make, setAttribute, setText } from "./dom.js";
import { age, clock } from "./format.js";

const MARKS = { broken: "\u2715", degraded: "!", note: "i", well: "\u2713" };
const WORDS = { broken: "Broken", degraded: "Degraded", note: "Note", well: "Well" };

function build(alert) {
  const what = make("strong", {});
  const since = make("span", { class: "since", "aria-hidden": "true" });
  const who = make("span", {});
  const words = make("span", {});
  const command = make("code", {});
  const whom = make("p", { class: "line" }, make("b", {}, "Who"), who);
  const action = make("p", { class: "line" }, make("b", {}, "Do"), make("span", {}, words, " ", command));
  const mark = make("span", { class: "mark", "aria-hidden": "true" }, MARKS[alert.level]);
  const level = make("span", { class: "hidden" });
  const node = make("li", {}, mark, make("div", {}, make("p", { class: "what" }, level, what, " ", since), whom, action));
  return {
    node,
    update(one) {
      setAttribute(node, "class", `alert ${one.level}`);
      setText(mark, MARKS[one.level]);
      setText(level, `${WORDS[one.level]}: `);
      setText(what, one.what);
      setText(since, one.since ? `since ${clock(one.since, one.now)}, ${age(one.now - one.since)}` : "");
      setText(who, one.who);
      setText(words, one.do);
      setText(command, one.command);
      command.hidden = !one.command;
      action.hidden = !one.do && !one.command;
      whom.hidden = !one.who;
    },
  };
}

const list = new Keyed(byId("alert-list"), (alert) => alert.key, build);
let last = null;

/** Show what the gateway says, or that all is well. */
export function showAlerts(picture, outdated) {
  last = picture;
  const now = picture.now;
  const alerts = picture.alerts.map((alert) => ({ ...alert, now }));
  if (outdated) {
    alerts.push({ key: "outdated", level: "note", what: "The appliance has been upgraded since this page was opened",
      who: "", do: "Load the page anew.", command: "", since: null, now });
  }
  if (!alerts.length) alerts.push(well(picture));
  list.show(alerts);
  title(picture.alerts);
}

/** Nothing answers: say so, since when, and what that means; what is below is old. */
export function showLost(since, reason, now) {
  const alert = { key: "lost", level: "broken", what: `No contact with the gateway: ${reason}`, since, now,
    who: "This page only, or everybody: what is below is from before.",
    do: "It is asked again every few seconds. On the machine:", command: "systemctl status athanor-gateway" };
  const known = last ? last.alerts.map((one) => ({ ...one, now: last.now })) : [];
  list.show([alert, ...known]);
  document.title = "\u2715 no contact \u00b7 Athanor";
}

function well(picture) {
  const names = picture.models.map((model) => model.name);
  const shown = names.length > 3 ? `${names.length} models` : names.join(", ");
  return { key: "well", level: "well", what: "All is well", since: null, now: picture.now, do: "", command: "",
    who: `${shown} ${names.length === 1 ? "answers" : "answer"}; nothing has failed in the last minute, and nobody waits long.` };
}

function title(alerts) {
  const broken = alerts.filter((alert) => alert.level === "broken").length;
  const degraded = alerts.filter((alert) => alert.level === "degraded").length;
  const words = broken ? `\u2715 ${broken} broken \u00b7 ` : degraded ? `! ${degraded} degraded \u00b7 ` : "";
  document.title = `${words}Athanor`;
}
