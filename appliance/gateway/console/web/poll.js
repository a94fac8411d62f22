// Asks the gateway once a second while somebody looks, and not at all while nobody does.

const PERIOD_MS = 1000;
const PATIENCE_MS = 5000; // An answer takes milliseconds; a gateway that needs longer hangs.
const SLOWEST_MS = 5000; // Between two tries when nothing answers.

/** `ask()` gives the query; `told(picture)` and `lost(reason, refused)` hear what came of it. `pace` may have another
    period and patience, in milliseconds. */
export class Poll {
  constructor(path, ask, told, lost, pace = {}) {
    this.period = pace.period ?? PERIOD_MS;
    this.patience = pace.patience ?? PATIENCE_MS;
    this.path = path;
    this.ask = ask;
    this.told = told;
    this.lost = lost;
    this.timer = 0;
    this.running = null;
    this.wait = this.period;
    document.addEventListener("visibilitychange", () => this.turn());
    window.addEventListener("online", () => this.now());
  }

  /** Begin or stop, as the page is seen or not. */
  turn() {
    if (document.hidden) this.stop();
    else this.now();
  }

  /** Ask at once; what is under way is given up. */
  now() {
    this.stop();
    if (!document.hidden) this.once();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.running) this.running.abort();
    this.running = null;
  }

  async once() {
    const control = new AbortController();
    this.running = control;
    const patience = setTimeout(() => control.abort("slow"), this.patience);
    const began = performance.now();
    try {
      const answer = await fetch(`${this.path}?${this.ask()}`, { signal: control.signal, cache: "no-store" });
      if (!answer.ok) throw new Refusal(await words(answer));
      const picture = await answer.json();
      if (this.running !== control) return;
      this.wait = this.period;
      this.told(picture);
    } catch (error) {
      if (this.running !== control) return; // Stopped by us: no news.
      this.lost(control.signal.aborted ? "it does not answer" : reason(error), error instanceof Refusal);
      this.wait = Math.min(2 * this.wait, SLOWEST_MS);
    } finally {
      clearTimeout(patience);
    }
    if (this.running !== control) return;
    this.running = null;
    const spent = performance.now() - began;
    if (!document.hidden) this.timer = setTimeout(() => this.once(), Math.max(100, this.wait - spent));
  }
}

/** An answer that says why there is nothing to show. */
class Refusal extends Error {}

async function words(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `it answered ${answer.status}`;
  }
}

function reason(error) {
  return error instanceof TypeError ? "nothing answers" : error.message;
}
