// The same data as text: tables, the card of one moment, the list of what went wrong.

import { clock, shown, span, weights } from "./format.js";

const RANKS = ["worker", "slot", "state", "version", "digest", "tier", "since", "last_transition", "provenance"];
const ENGINES = ["engine", "state", "version", "behind_by", "reason"];
const TRANSITIONS = ["time", "lane", "trigger", "state", "slot", "version", "digest", "lasted", "provenance", "reason"];

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function swatch(colour) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}

export function ranks(table, rows, now) {
  fill(table, RANKS, rows.map((row) => ({ ...row, since: row.since ? `${span(now - row.since)} ago` : null, state: shown(row.state) })));
}

export function engines(table, rows) {
  fill(table, ENGINES, rows.map((row) => ({ ...row, version: row.version == null ? null : weights(row) })));
}

export function transitions(table, rows) {
  fill(table, TRANSITIONS, rows.map((row) => ({
    ...row,
    time: clock(row.start, true),
    state: shown(row.state),
    lasted: row.end ? span(row.end - row.start) : null,
  })));
}

function fill(table, columns, rows) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name.replace("_", " "))));
  const body = rows.map((row) => element("tr", {}, ...columns.map((name) => cell(name, row))));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function cell(name, row) {
  const value = row[name];
  const text = value === null || value === undefined || value === "" ? "–" : String(value);
  const isBad = ["poisoned", "dead", "unreachable"].includes(text) && row.reason !== "shut down";
  const tone = name === "state" && isBad ? "bad" : null;
  const kind = name === "digest" ? "code" : ["provenance", "reason"].includes(name) ? "wrap" : null;
  return element("td", { class: kind, "data-tone": tone }, text);
}

/** One moment of one lane, `told` by the server. */
export function moment(box, told, colour) {
  if (!told) {
    box.replaceChildren(element("p", { class: "quiet" }, "Point at a lane, or choose one with the arrow keys, to see what it held and where that came from."));
    return;
  }
  const holds = shown(told.state) + (told.version == null ? "" : ` ${told.version}`);
  const facts = [
    ["when", `${clock(told.start, true)}, for ${span(told.end - told.start)}`],
    ["slot", told.slot && `${told.slot}${told.version == null ? "" : `@${told.version}`}`],
    ["digest", told.digest && element("code", {}, told.digest)],
    ["from", told.provenance],
    ["tier", told.tier],
    ["by", `${told.trigger}${told.transition ? `, transition ${told.transition}` : ""}`],
    ["publish", told.publish_id],
    ["rollout", told.rollout_id],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  box.replaceChildren(
    element("h3", { class: "quiet" }, told.lane),
    element("p", { class: "holds" }, swatch(colour), holds),
    element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value instanceof Node ? value : String(value))])),
    ...(told.reason ? [element("p", { class: "reason" }, told.reason)] : []),
  );
}

/** What happened to several lanes at once, for the same reason, once: with the number of the others. */
function alike(problems) {
  const groups = new Map();
  for (const problem of problems) {
    const key = [problem.what, problem.reason, Math.round(problem.at)].join("\n");
    groups.set(key, [problem, (groups.get(key)?.[1] ?? -1) + 1]);
  }
  return [...groups.values()];
}

export function trouble(list, problems, chosen) {
  if (!problems.total) {
    list.replaceChildren(element("li", { class: "quiet" }, "None so far."));
    return;
  }
  const items = alike(problems.newest).map(([problem, others]) => {
    const more = others ? ` and ${others} more` : "";
    const button = element("button", { type: "button" },
      element("strong", {}, `${problem.lane}${more} ${problem.what}`), ` ${clock(problem.at)}`, element("span", {}, problem.reason.split("\n")[0]));
    button.addEventListener("click", () => chosen(problem));
    return element("li", {}, button);
  });
  const rest = problems.total - problems.newest.length;
  list.replaceChildren(...items, ...(rest ? [element("li", { class: "quiet" }, `and ${rest} older ones, in the journals`)] : []));
}
