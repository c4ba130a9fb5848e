// Asks the server for its numbers: every few seconds, less often while the tab is hidden or the server is away.

const POLL_MS = 4_000;
const HIDDEN_MS = 60_000;
const AWAY_MS = [2_000, 15_000];
const TIMEOUT_MS = 5_000;
const TOKEN = "kvpool-token";

class RefusedError extends Error {}

// The browser's storage of this name; where site data are blocked, an object that lives as long as the page.
export function storage(name) {
  try {
    return window[name];
  } catch {
    return {};
  }
}

const session = storage("sessionStorage");

export class Source {
  #timer = 0;
  #failures = 0;
  #isPolling = false;
  #isWanted = false; // Another poll was asked for during this one.
  #isRefused = false; // Until there is another token: each refusal is a line in the server's audit log.

  // onPoll: asked for each poll, with `get`; onAway: the server does not answer; onRefused: a RefusedError.
  constructor({ onPoll, onAway, onRefused }) {
    this.onPoll = onPoll;
    this.onAway = onAway;
    this.onRefused = onRefused;
    document.addEventListener("visibilitychange", () => document.hidden || this.poll());
  }

  get token() {
    return session[TOKEN] ?? "";
  }

  set token(token) {
    if (token) session[TOKEN] = token;
    else delete session[TOKEN];
    this.#isRefused = false;
  }

  async poll() {
    if (this.#isRefused) return;
    this.#isWanted = this.#isPolling;
    if (this.#isPolling) return;
    this.#isPolling = true;
    clearTimeout(this.#timer);
    let failure = null;
    try {
      await this.onPoll((path) => this.#get(path));
      this.#failures = 0;
    } catch (error) {
      failure = error;
    }
    this.#isPolling = false;
    if (failure instanceof RefusedError) {
      this.onRefused(failure);
      this.token = "";
      this.#isRefused = true;
      return;
    }
    if (failure) {
      this.#failures += 1;
      this.onAway(failure);
    }
    this.#timer = setTimeout(() => this.poll(), this.#isWanted && !failure ? 0 : this.#pause());
  }

  #pause() {
    if (document.hidden) return HIDDEN_MS;
    return this.#failures ? Math.min(AWAY_MS[0] * 2 ** (this.#failures - 1), AWAY_MS[1]) : POLL_MS;
  }

  async #get(path) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    const options = { headers, cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(TIMEOUT_MS) };
    const response = await fetch(path, options);
    if (response.status === 401 || response.status === 403) {
      throw new RefusedError((await response.text()).trim().slice(0, 500));
    }
    if (!response.ok) throw new Error(`the server answered with status ${response.status}`);
    return response.json();
  }
}
