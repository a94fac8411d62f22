// The page: one look a second at the gateway, handed to each part.

import { showAlerts, showLost } from "./alerts.js";
import { showBatches } from "./batches.js";
import { byId, setText } from "./dom.js";
import { age } from "./format.js";
import { showGpus } from "./gpus.js";
import { contact, upgraded } from "./head.js";
import * as headline from "./headline.js";
import { showKv } from "./kvmap.js";
import { Poll } from "./poll.js";
import * as requests from "./requests.js";
import { showPolicy, showSandboxes } from "./sandboxes.js";
import { page, showTenants, startTenants } from "./tenants.js";
import { startTheme } from "./theme.js";

let last = null; // The newest picture.
let heard = 0; // When it came, by this machine's clock: the gateway's need not agree.

function ask() {
  return new URLSearchParams({ after: headline.newest(), seen: requests.filter.mark, outcome: requests.filter.outcome,
    offset: page.offset, find: page.find });
}

function told(picture) {
  if (last && last.started_at !== picture.started_at) {
    // Another life of the gateway: what was known of the old one is not its.
    headline.forget();
    requests.forget();
    last = null;
    poll.wait = 0;
  }
  last = picture;
  heard = Date.now() / 1000;
  contact(picture.ready ? "live" : "waiting", picture.ready ? "live" : "not ready");
  setText(byId("about"), `${picture.version} \u00b7 up ${age(picture.load.up_s)}`);
  setText(byId("foot"), "Read-only. Rates are those of the last ten seconds; names and numbers only, never content.");
  showAlerts(picture, upgraded(picture.page));
  headline.showHeadline(picture);
  showKv(picture);
  showSandboxes(picture);
  showGpus(picture);
  showBatches(picture);
  showPolicy(picture);
  requests.showRequests(picture);
  showTenants(picture);
}

function lost(reason) {
  const now = Date.now() / 1000;
  heard = heard || now;
  contact("lost", "no contact");
  showLost(heard, reason, now);
}

const poll = new Poll("look", ask, told, lost);
startTheme();
requests.startRequests(() => poll.now());
startTenants(() => poll.now());
poll.turn();
