// The head of every page: whether the gateway answers, and whether it has other files than this page by now.

import { byId, setAttribute, setText } from "./dom.js";

let loaded = ""; // Digest of the page's files when it was loaded.

/** Show the state of the contact; "lost" greys what is below, which is from before. */
export function contact(state, words) {
  setAttribute(document.documentElement, "data-lost", state === "lost");
  setAttribute(byId("contact"), "data-state", state);
  setText(byId("contact-text"), words);
}

/** Whether the gateway has other files than those that were loaded, by the digest that it tells. */
export function upgraded(digest) {
  loaded = loaded || digest;
  return loaded !== digest;
}

/** Show a gateway that answers, on a page that has no more to say of it. */
export function live(look) {
  contact("live", upgraded(look.page) ? "upgraded: reload" : "live");
  setText(byId("about"), look.version);
}
