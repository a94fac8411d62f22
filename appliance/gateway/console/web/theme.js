// Light, dark, or as the system says; the choice stays in this browser.

import { byId, setAttribute, setText } from "./dom.js";

const KEY = "athanor-theme";
const ORDER = ["system", "light", "dark"];

function stored() {
  try {
    const value = localStorage.getItem(KEY);
    return ORDER.includes(value) ? value : "system";
  } catch {
    return "system"; // Storage may be forbidden; the page works without.
  }
}

function apply(theme) {
  setAttribute(document.documentElement, "data-theme", theme === "system" ? null : theme);
  setText(byId("theme"), `Theme: ${theme}`);
}

/** Put the stored choice in force and let the button go round. */
export function startTheme() {
  let theme = stored();
  apply(theme);
  byId("theme").addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    apply(theme);
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // As above.
    }
  });
}
