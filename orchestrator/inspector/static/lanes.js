// The picture of the lanes: ranks above, engines below, publishes across, what went wrong in red.

import { clock, shown, ticks } from "./format.js";

export const GUTTER = 92;
export const MARGIN = 48;
const RAIL = 34;
const AXIS = 26;
const BETWEEN = 26;
const BAD = new Set(["poisoned", "dead"]);
const HATCHED = new Set(["poisoned", "dead", "stale"]);
const LANES_HEIGHT = 512;

export class Lanes {
  constructor(canvas, codes) {
    this.canvas = canvas;
    this.codes = codes;
    this.picture = null;
    this.selected = null;
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colour = Object.fromEntries(["ink", "muted", "faint", "line", "surface", "bad", "accent"].map((n) => [n, colour(n)]));
    this.fills = this.codes.map(colour);
    this.rgb = this.fills.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    this.dark = this.rgb.map(([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b < 125);
    this.patterns = new Map();
  }

  get width() {
    return Math.max(this.canvas.clientWidth - GUTTER - MARGIN, 50);
  }

  /** Columns to ask for: one a pixel where lanes are few, fewer where many have to be sent and drawn. */
  columns(lanes) {
    return Math.min(Math.round(this.width), lanes > 128 ? 600 : 1200);
  }

  show(picture) {
    this.picture = picture;
    this.places = layout(picture.lanes);
    this.image = null;
  }

  time(x, view) {
    return view.start + ((x - GUTTER) / this.width) * (view.end - view.start);
  }

  x(time, view) {
    return GUTTER + ((time - view.start) / (view.end - view.start)) * this.width;
  }

  /** Index of the lane at a height, or null. */
  laneAt(y) {
    const at = this.places?.rows.findIndex((row) => y >= row.top && y < row.top + row.height);
    return at === undefined || at < 0 ? null : at;
  }

  draw(view) {
    if (!this.picture) return;
    const { canvas, places } = this;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, places.height];
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    }
    const pen = (this.pen = canvas.getContext("2d"));
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    this.#grid(view);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width, height);
    pen.clip();
    if (places.laneHeight < 6) this.#fine(view, places.ranks);
    else this.#coarse(view, places.ranks);
    this.#coarse(view, places.engines);
    this.#words(view);
    this.#marks(view);
    this.#problems(view);
    this.#selection(view);
    pen.restore();
    this.#labels();
  }

  #grid(view) {
    const { pen, places, colour } = this;
    const { step, at } = ticks(view.start, view.end, this.width / 110);
    pen.textAlign = "center";
    for (const time of at) {
      const x = Math.round(this.x(time, view)) + 0.5;
      pen.fillStyle = colour.line;
      pen.fillRect(x, RAIL, 1, places.height - AXIS - RAIL);
      pen.fillStyle = colour.muted;
      const text = clock(time, step < 1);
      if (x > GUTTER + 20 && x < GUTTER + this.width - 20) pen.fillText(text, x, places.height - AXIS / 2);
    }
  }

  /** Tall lanes: each cell of its first state, the second one along the bottom for its share. */
  #coarse(view, rows) {
    const { picture, pen } = this;
    const seconds = (picture.end - picture.start) / picture.columns;
    for (const row of rows) {
      const base = row.index * picture.columns * 3;
      for (let column = 0; column < picture.columns; ) {
        const at = base + column * 3;
        const [first, second, share] = picture.cells.subarray(at, at + 3);
        let next = column + 1;
        while (next < picture.columns && same(picture.cells, at, base + next * 3)) next += 1;
        if (first) {
          const left = this.x(picture.start + column * seconds, view);
          const right = this.x(picture.start + next * seconds, view);
          if (right > GUTTER && left < GUTTER + this.width) {
            this.#fill(first, left, row.top, right - left, row.height);
            if (second) {
              const part = Math.max(2, Math.round((row.height * share) / 255));
              this.#fill(second, left, row.top + row.height - part, right - left, part);
            }
          }
        }
        column = next;
      }
    }
    pen.globalAlpha = 1;
  }

  #fill(code, x, y, width, height) {
    const { pen } = this;
    // A hair wider, so that neighbours leave no seam between them.
    pen.fillStyle = this.fills[code];
    pen.fillRect(x, y, width + 0.4, height);
    if (HATCHED.has(this.codes[code]) && width > 3 && height > 5) {
      pen.fillStyle = this.#hatch(code);
      pen.fillRect(x, y, width + 0.4, height);
    }
  }

  #hatch(code) {
    if (!this.patterns.has(code)) {
      const tile = new OffscreenCanvas(8, 8);
      const pen = tile.getContext("2d");
      pen.strokeStyle = this.colour.surface;
      pen.globalAlpha = 0.45;
      pen.lineWidth = 1.6;
      for (const shift of [-8, 0, 8]) {
        pen.moveTo(shift, 8);
        pen.lineTo(shift + 8, 0);
      }
      pen.stroke();
      this.patterns.set(code, this.pen.createPattern(tile, "repeat"));
    }
    return this.patterns.get(code);
  }

  /** Lanes of a pixel or few: an image, its second states mixed in and never too faint to be seen. */
  #fine(view, rows) {
    const { picture, pen } = this;
    this.image ??= this.#image(rows.length);
    const [left, right] = [this.x(picture.start, view), this.x(picture.end, view)];
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.image, left, rows[0].top, right - left, rows.length * rows[0].height);
  }

  #image(count) {
    const { picture, rgb } = this;
    const canvas = new OffscreenCanvas(picture.columns, count);
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(picture.columns, count);
    const { cells } = picture;
    for (let cell = 0; cell < picture.columns * count; cell += 1) {
      const [first, second, share] = [cells[cell * 3], cells[cell * 3 + 1], cells[cell * 3 + 2]];
      if (!first) continue;
      const part = second && !BAD.has(this.codes[first]) ? Math.max(0.35, share / 255) : 0;
      for (let channel = 0; channel < 3; channel += 1) {
        image.data[cell * 4 + channel] = rgb[first][channel] * (1 - part) + (part ? rgb[second][channel] * part : 0);
      }
      image.data[cell * 4 + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    return canvas;
  }

  #words(view) {
    const { pen, picture, places } = this;
    pen.textAlign = "left";
    for (const word of picture.words) {
      const row = places.rows[word.row];
      if (row.height < 15) continue;
      const left = Math.max(this.x(word.start, view), GUTTER);
      const room = Math.min(this.x(word.end, view), GUTTER + this.width) - left - 10;
      const name = shown(this.codes[word.code]);
      const texts = word.version === null ? [name] : [`${name} ${word.version}`, String(word.version)];
      const text = texts.find((candidate) => pen.measureText(candidate).width <= room);
      if (!text) continue;
      pen.fillStyle = this.dark[word.code] ? "#ffffff" : "#1d2125";
      pen.fillText(text, left + 5, row.top + row.height / 2 + 0.5);
    }
  }

  /** Publishes: a mark on the rail for each, a line across the lanes where there is room for lines. */
  #marks(view) {
    const { pen, picture, places, colour } = this;
    const inside = picture.marks.filter((mark) => mark.at >= view.start && mark.at <= view.end);
    const roomy = inside.length * 14 < this.width;
    let labelled = -Infinity;
    for (const mark of inside) {
      const x = Math.round(this.x(mark.at, view)) + 0.5;
      const failed = mark.outcome !== "committed";
      pen.fillStyle = pen.strokeStyle = failed ? colour.bad : colour.ink;
      pen.beginPath();
      if (failed) {
        pen.lineWidth = 1.6;
        for (const slope of [-1, 1]) {
          pen.moveTo(x - 3.5, RAIL - 9 - 3.5 * slope);
          pen.lineTo(x + 3.5, RAIL - 9 + 3.5 * slope);
        }
        pen.stroke();
      } else {
        pen.moveTo(x - 3, RAIL - 10);
        pen.lineTo(x + 3, RAIL - 10);
        pen.lineTo(x, RAIL - 5);
        pen.fill();
      }
      if (roomy || failed) {
        pen.globalAlpha = failed ? 0.9 : 0.38;
        pen.setLineDash(failed ? [4, 3] : []);
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x, RAIL - 4);
        pen.lineTo(x, places.height - AXIS);
        pen.stroke();
        pen.setLineDash([]);
        pen.globalAlpha = 1;
      }
      const text = mark.version == null ? "refused" : `${mark.incarnation}.${mark.version}`;
      const half = pen.measureText(text).width / 2;
      if (x - half > labelled + 7 && x - half > GUTTER && x + half < GUTTER + this.width) {
        pen.textAlign = "center";
        pen.fillText(text, x, 11);
        labelled = x + half;
      }
    }
  }

  /** Refusals and poisonings: a dot on the lane, large enough to see where a lane is a pixel. */
  #problems(view) {
    const { pen, picture, places, colour } = this;
    const names = new Map(picture.lanes.map((lane, index) => [lane.name, index]));
    for (const problem of picture.problems) {
      const row = places.rows[names.get(problem.lane)];
      if (!row) continue;
      pen.beginPath();
      pen.arc(this.x(problem.at, view), row.top + row.height / 2, 4.5, 0, 7);
      pen.fillStyle = colour.bad;
      pen.strokeStyle = colour.surface;
      pen.lineWidth = 1.6;
      pen.fill();
      pen.stroke();
    }
  }

  #selection(view) {
    const { pen, places, selected, colour } = this;
    const row = selected && places.rows[this.picture.lanes.findIndex((lane) => lane.name === selected.lane)];
    if (!row) return;
    const left = Math.max(this.x(selected.start, view), GUTTER - 4);
    const right = Math.min(this.x(selected.end, view), GUTTER + this.width + 4);
    if (right < GUTTER || left > GUTTER + this.width) return;
    const grown = Math.max(0, 7 - row.height) / 2;
    pen.lineWidth = 4;
    pen.strokeStyle = colour.surface;
    const box = [left, row.top - grown, Math.max(right - left, 3), row.height + 2 * grown];
    pen.strokeRect(...box);
    pen.lineWidth = 2;
    pen.strokeStyle = colour.ink;
    pen.strokeRect(...box);
  }

  #labels() {
    const { pen, picture, places, colour, selected } = this;
    pen.textAlign = "right";
    let below = -Infinity;
    for (const row of places.rows) {
      const { name, kind } = picture.lanes[row.index];
      const isSelected = selected?.lane === name;
      const middle = row.top + row.height / 2;
      if (!isSelected && (middle - below < 13 || (row.height < 6 && row.index % places.every))) continue;
      if (!isSelected && selected && row.height < 13 && Math.abs(middle - this.#middle(selected.lane)) < 13) continue;
      below = isSelected ? below : middle;
      pen.fillStyle = isSelected ? colour.ink : colour.muted;
      pen.fillText(kind === "engine" ? name.split("/").slice(-2).join("/") : name, GUTTER - 10, middle + 0.5);
    }
    pen.fillStyle = colour.muted;
    pen.fillText("publishes", GUTTER - 10, 11);
  }

  #middle(name) {
    const row = this.places.rows[this.picture.lanes.findIndex((lane) => lane.name === name)];
    return row ? row.top + row.height / 2 : -Infinity;
  }
}

/** Where each lane goes: ranks share a height of about LANES_HEIGHT, engines keep a readable one. */
export function layout(lanes) {
  const ranks = lanes.filter((lane) => lane.kind === "rank").length;
  const engines = lanes.length - ranks;
  const laneHeight = Math.max(1, Math.min(26, Math.floor(LANES_HEIGHT / Math.max(ranks, 1))));
  const engineHeight = engines > 8 ? Math.max(6, Math.floor(160 / engines)) : 20;
  const gap = (height) => (height > 12 ? 3 : height > 5 ? 1 : 0);
  const rows = [];
  let top = RAIL;
  lanes.forEach((lane, index) => {
    if (index === ranks && ranks) top += BETWEEN;
    const height = lane.kind === "rank" ? laneHeight : engineHeight;
    rows.push({ index, top, height: height - gap(height) });
    top += height;
  });
  const every = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((step) => step * laneHeight >= 32) ?? 512;
  return { rows, ranks: rows.slice(0, ranks), engines: rows.slice(ranks), laneHeight, every, height: top + 6 + AXIS };
}

function same(cells, a, b) {
  return cells[a] === cells[b] && cells[a + 1] === cells[b + 1] && cells[a + 2] === cells[b + 2];
}
