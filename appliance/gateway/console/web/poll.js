// Asks the gateway once a second while somebody looks, and not at all while nobody does.

const PERIOD_MS = 1000;
const PATIENCE_MS = 5000; // An answer takes milliseconds; a gateway that needs longer hangs.
const SLOWEST_MS = 5000; // Between two tries when nothing answers.

/** `ask()` gives the query; `told(picture)` and `lost(reason)` hear what came of it. */
export class Poll {
  constructor(path, ask, told, lost) {
    this.path = path;
    this.ask = ask;
    this.told = told;
    this.lost = lost;
    this.timer = 0;
    this.running = null;
    this.wait = PERIOD_MS;
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
    const patience = setTimeout(() => control.abort("slow"), PATIENCE_MS);
    const began = performance.now();
    try {
      const answer = await fetch(`${this.path}?${this.ask()}`, { signal: control.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      const picture = await answer.json();
      if (this.running !== control) return;
      this.wait = PERIOD_MS;
      this.told(picture);
    } catch (error) {
      if (this.running !== control) return; // Stopped by us: no news.
      this.lost(control.signal.aborted ? "it does not answer" : reason(error));
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

function reason(error) {
  return error instanceof TypeError ? "nothing answers" : error.message;
}
