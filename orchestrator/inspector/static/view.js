// The window of time that is shown, within the time that the run has taken so far.

const SHORTEST_S = 0.05;

export class View {
  constructor(changed) {
    this.changed = changed;
    this.first = 0;
    this.last = 1;
    this.start = 0;
    this.end = 1;
    this.isWhole = true;
    this.follows = false;
  }

  /** The run has grown. A view of the whole run grows with it, and one that follows moves on. */
  grow(first, last) {
    const moved = last - this.last;
    [this.first, this.last] = [first, Math.max(last, first + 1)];
    if (this.isWhole) this.#set(this.first, this.last, true);
    else if (this.follows && moved > 0) this.#set(this.last - (this.end - this.start), this.last);
  }

  whole() {
    this.follows = false;
    this.#set(this.first, this.last, true);
  }

  follow(seconds) {
    this.follows = true;
    this.#set(this.last - seconds, this.last);
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    const seconds = Math.max((this.end - this.start) * factor, SHORTEST_S);
    if (seconds >= this.last - this.first) return this.whole();
    const share = (at - this.start) / (this.end - this.start);
    this.#settle(at - share * seconds, seconds);
  }

  pan(seconds) {
    if (!this.isWhole) this.#settle(this.start + seconds, this.end - this.start);
  }

  /** Bring a moment into view, `seconds` around it. */
  show(at, seconds = this.end - this.start) {
    this.#settle(at - seconds / 2, Math.min(seconds, this.last - this.first));
  }

  #settle(start, seconds) {
    const from = Math.min(Math.max(start, this.first), this.last - seconds);
    this.follows = this.follows && from + seconds >= this.last - 1e-6;
    this.#set(from, from + seconds);
  }

  #set(start, end, isWhole = false) {
    [this.start, this.end, this.isWhole] = [start, end, isWhole];
    this.changed();
  }
}
