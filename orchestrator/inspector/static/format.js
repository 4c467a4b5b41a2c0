// Numbers and times as people read them.

const pad = (number) => String(number).padStart(2, "0");

export function clock(seconds, fraction = false) {
  const at = new Date(seconds * 1000);
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return fraction ? `${time}.${String(at.getMilliseconds()).padStart(3, "0")}` : time;
}

export function span(seconds) {
  if (seconds < 1) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const weights = (row) => (row.incarnation == null ? `${row.version}` : `${row.incarnation}.${row.version}`);

/** `resident.ref` is read as `ref`. */
export const shown = (state) => state.replace(/^resident\./, "").replace("_", " ");

/** Where to put the labels of a time axis: at most `most` round times in a window. */
export function ticks(start, end, most) {
  const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200];
  const step = steps.find((candidate) => (end - start) / candidate <= most) ?? 86400;
  const offset = new Date(start * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((start - offset) / step) * step + offset; at <= end; at += step) found.push(at);
  return { step, at: found };
}
