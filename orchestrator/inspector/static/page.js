// The page: what is shown, when it is asked for again, and what the hand does.

import { Problem, json, picture } from "./api.js";
import { clock, shown, weights } from "./format.js";
import { GUTTER, Lanes } from "./lanes.js";
import { Metrics } from "./metrics.js";
import * as tables from "./tables.js";
import { View } from "./view.js";

const POLL_MS = 1000;
const FOLLOWED_S = 60;
const LEGEND = ["actor", "stepping", "publishing", "saving", "ref", "teacher", "old_actor", "critic", "loading", "switching", "asleep", "poisoned", "serving", "updating", "stale", "dead"];
const TONES = { running: "good", done: "done", failed: "bad", silent: "busy" };
const $ = (id) => document.getElementById(id);

const view = new View(() => changed());
const metrics = new Metrics($("metrics"));
let lanes = null;
let summary = null;
let seen = { revision: -1, steps: -1, problems: 0, published: null };
let ranks = "";
let page = 0;
let pending = null;
let told = 0;

// ---- asking --------------------------------------------------------------------------------------------------

async function poll() {
  try {
    summary = await json("/api/summary");
    if (!lanes) {
      lanes = new Lanes($("lanes"), summary.codes);
      $("follow").hidden = summary.status !== "running";
    }
    facts();
    legend();
    const isNew = summary.revision !== seen.revision;
    if (isNew || summary.status === "running") view.grow(summary.first ?? 0, summary.last ?? 1);
    if (summary.steps !== seen.steps) metrics.show(await json("/api/metrics"), view);
    if (isNew) await now();
    seen = { revision: summary.revision, steps: summary.steps, problems: summary.problems.total, published: summary.published?.publish_id };
  } catch (error) {
    status("gone", error instanceof Problem ? error.message : "the server does not answer", "busy");
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

async function now() {
  const rows = await json("/api/slots");
  tables.ranks($("ranks-now"), rows.workers, summary.now);
  tables.engines($("engines-now"), rows.engines);
  tables.trouble($("trouble"), summary.problems, chooseProblem);
  announce();
}

/** The view moved: show what there is of it at once, and ask for a picture of it. */
function changed() {
  if (!lanes) return;
  requestAnimationFrame(() => draw());
  if (pending) pending.again = true;
  else ask();
}

async function ask() {
  pending = { again: false };
  const asked = performance.now();
  const columns = lanes.columns(summary.ranks);
  try {
    const wrong = $("filter-wrong");
    wrong.hidden = true;
    lanes.show(await picture({ start: view.start, end: view.end, columns, ranks }));
    draw();
    // For people who look into the browser's own timings, and for the test that says how long this may take.
    performance.measure("window", { start: asked });
    performance.mark("drawn");
    list().catch((error) => status("gone", error.message, "busy"));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("filter-wrong").textContent = error.message;
    $("filter-wrong").hidden = false;
  } finally {
    const again = pending.again;
    pending = null;
    if (again) ask();
  }
}

let listing = 0;
async function list() {
  const turn = (listing += 1);
  await new Promise((done) => setTimeout(done, 200));
  if (turn !== listing) return;
  const found = await json("/api/transitions", { start: view.start, end: view.end, ranks, offset: page });
  tables.transitions($("transitions"), found.transitions);
  const last = Math.min(page + found.page, found.total);
  $("page-of").textContent = found.total ? `${page + 1} to ${last} of ${found.total}, newest first` : "none";
  $("newer").disabled = page === 0;
  $("older").disabled = last >= found.total;
}

function draw() {
  lanes.draw(view);
  metrics.draw(view);
  $("whole").disabled = view.isWhole;
  $("follow").setAttribute("aria-pressed", String(view.follows));
}

// ---- saying --------------------------------------------------------------------------------------------------

function facts() {
  const { published, outcomes } = summary;
  const failed = Object.entries(outcomes).filter(([outcome]) => outcome !== "committed");
  const all = [
    ["Resident", summary.resident.text, summary.resident.tone],
    ["Engines", summary.serving.text, summary.serving.tone],
    ["Published", published ? `actor ${weights(published)}` : "nothing yet", "good", published?.digest],
    ["Publishes", `${outcomes.committed ?? 0}`, failed.length ? "bad" : "good", failed.map(([outcome, count]) => `${count} ${outcome}`).join(", ")],
    ["Checkpoints", `${summary.saves}`, "good"],
    ["Trouble", summary.problems.total ? `${summary.problems.total}` : "none", summary.problems.total ? "bad" : "good"],
  ];
  $("facts").replaceChildren(...all.map(([name, text, tone, small]) =>
    tables.element("div", {}, tables.element("dt", {}, name),
      tables.element("dd", { "data-tone": tone }, text, ...(small ? [tables.element("small", { class: name === "Published" ? "code" : null }, small)] : [])))));
  $("run").textContent = summary.run;
  document.title = `${summary.run}: slots`;
  status(summary.status, aboutRun(), TONES[summary.status]);
}

function aboutRun() {
  const damaged = Object.entries(summary.damaged).map(([file, lines]) => `${lines} unreadable in ${file}`);
  const started = summary.started === null ? "not started" : `incarnation ${summary.incarnation}, since ${clock(summary.started)}`;
  const silent = summary.status === "silent" ? ["has not ended, and its driver is not on this machine"] : [];
  return [`${summary.ranks} ranks, ${summary.engines} engines`, started, ...silent, ...damaged].join(" · ");
}

function status(text, about, tone) {
  $("status").textContent = text;
  $("status").dataset.tone = tone;
  $("status").toggleAttribute("data-live", text === "running");
  $("about").textContent = about;
}

/** For those who do not see the picture: what is new that matters. */
function announce() {
  if (seen.revision < 0) return;
  const news = [];
  if (summary.problems.total > seen.problems) {
    const newest = summary.problems.newest[0];
    news.push(`${newest.lane} ${newest.what}: ${newest.reason}`);
  }
  if (summary.published && summary.published.publish_id !== seen.published) news.push(`actor ${weights(summary.published)} published`);
  if (news.length) $("said").textContent = news.join(". ");
}

function legend() {
  const present = LEGEND.filter((name) => summary.present.includes(name));
  if (present.length === $("legend").children.length) return;
  $("legend").replaceChildren(...present.map((name) => {
    const made = tables.swatch("");
    made.style.background = `var(--${name})`;
    return tables.element("li", { "data-code": name }, made, shown(name));
  }));
}

// ---- choosing ------------------------------------------------------------------------------------------------

async function choose(parameters, aloud = false) {
  const turn = (told += 1);
  const found = await json("/api/moment", parameters).catch(() => null);
  if (turn !== told || !found) return;
  lanes.selected = found;
  tables.moment($("moment"), found, colourOf(found.state));
  if (aloud) {
    $("said").textContent = `${found.lane}: ${shown(found.state)} ${found.version ?? ""}, ${clock(found.start)}. ${found.reason ?? ""}`;
    if (found.start < view.start || found.start > view.end) return view.show(found.start);
  }
  draw();
}

const colourOf = (state) => `var(--${state.replace(/^resident\./, "")})`;

function chooseProblem(problem) {
  view.show(problem.at, Math.min(30, view.last - view.first));
  choose({ lane: problem.lane, time: problem.at }, true);
}

// ---- the hand ------------------------------------------------------------------------------------------------

const stage = $("stage");
let dragged = null;

stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const x = event.clientX - stage.getBoundingClientRect().left;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan((event.deltaX / lanes.width) * (view.end - view.start));
  else view.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) * 0.003), lanes.time(Math.max(x, GUTTER), view));
}, { passive: false });

stage.addEventListener("pointerdown", (event) => {
  dragged = { x: event.clientX, moved: false };
  stage.setPointerCapture(event.pointerId);
});

stage.addEventListener("pointerup", (event) => {
  const wasClick = dragged && !dragged.moved;
  dragged = null;
  if (wasClick) point(event);
});

stage.addEventListener("pointermove", (event) => {
  if (!lanes) return;
  if (dragged && (dragged.moved || Math.abs(event.clientX - dragged.x) > 3)) {
    view.pan(((dragged.x - event.clientX) / lanes.width) * (view.end - view.start));
    dragged = { x: event.clientX, moved: true };
    return;
  }
  point(event);
});

stage.addEventListener("pointerleave", () => {
  $("crosshair").hidden = true;
  metrics.point(null);
});

stage.addEventListener("dblclick", () => view.whole());

function point(event) {
  const frame = stage.getBoundingClientRect();
  const x = event.clientX - frame.left;
  const time = lanes.time(x, view);
  const inside = time >= view.start && time <= view.end;
  $("crosshair").hidden = !inside;
  $("crosshair").style.left = `${x}px`;
  metrics.point(inside ? time : null);
  const lane = inside ? lanes.laneAt(event.clientY - $("lanes").getBoundingClientRect().top) : null;
  if (lane !== null) choose({ lane: lanes.picture.lanes[lane].name, time });
}

$("lanes").addEventListener("keydown", (event) => {
  const { selected, picture: shownNow } = lanes;
  const at = shownNow.lanes.findIndex((lane) => lane.name === selected?.lane);
  const keys = {
    ArrowUp: () => step(at - 1),
    ArrowDown: () => step(at + 1),
    ArrowLeft: () => (selected ? choose({ lane: selected.lane, index: Math.max(0, selected.index - 1) }, true) : step(0)),
    ArrowRight: () => (selected ? choose({ lane: selected.lane, index: selected.index + 1 }, true) : step(0)),
    "+": () => view.zoom(0.5, selected?.start),
    "=": () => view.zoom(0.5, selected?.start),
    "-": () => view.zoom(2, selected?.start),
    Home: () => view.whole(),
  };
  const step = (index) => {
    const lane = shownNow.lanes[Math.min(Math.max(index, 0), shownNow.lanes.length - 1)];
    return choose({ lane: lane.name, time: selected ? Math.max(selected.start, view.start) : view.end }, true);
  };
  if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  keys[event.key]();
});

$("whole").addEventListener("click", () => view.whole());
$("nearer").addEventListener("click", () => view.zoom(0.5, lanes.selected?.start));
$("farther").addEventListener("click", () => view.zoom(2, lanes.selected?.start));
$("follow").addEventListener("click", () => view.follow(Math.min(FOLLOWED_S, view.last - view.first)));
$("newer").addEventListener("click", () => turnPage(-100));
$("older").addEventListener("click", () => turnPage(100));
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("filter").addEventListener("input", () => {
  [ranks, page] = [$("filter").value, 0];
  changed();
});

function turnPage(by) {
  page = Math.max(0, page + by);
  list();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  lanes.readColours();
  lanes.image = null;
  metrics.rebuild(view);
  draw();
});
new ResizeObserver(() => changed()).observe(stage);

tables.moment($("moment"), null);
poll();
