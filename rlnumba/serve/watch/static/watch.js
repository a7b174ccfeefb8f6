// The page: its runs, its three views, and what is asked of the server every two seconds.

import { Chart } from "./chart.js";
import { Completions } from "./completions.js";
import { $, ask, bytes, colour, element, hideTip, kept, seconds, short, trouble } from "./page.js";

const EVERY_MS = 2000;
const VIEWS = ["curves", "resources", "completions"];
const MOST_USUAL = 9;

const page = {
  runs: [],             // {name, path, trainer, steps, finished, index}
  hidden: new Set(),    // names of runs that are not drawn
  found: new Map(),     // name -> the newest answer of /api/curves
  panels: [],           // the usual metrics, with titles
  picked: kept("metrics"),
  smoothing: kept("smoothing") ?? 0.6,
  charts: new Map(),    // metric -> Chart
  view: null,
};

const shownRuns = () => page.runs.filter((run) => !page.hidden.has(run.name));

// The names of all metrics of all runs, in their order.
function names() {
  return [...new Set(page.runs.flatMap((run) => page.found.get(run.name)?.names ?? []))];
}

function usual() {
  const known = new Set(names());
  const found = page.panels.map((panel) => panel.name).filter((name) => known.has(name));
  return (found.length ? found : names()).slice(0, MOST_USUAL);
}

const picked = () => page.picked ?? usual();
const SPEEDS = [
  ["perf/throughput", "trained tokens a second", short],
  ["perf/generation_tokens_per_s", "generated tokens a second", short],
  ["step_time", "time of a step", seconds],
  ["perf/peak_memory", "peak of the device's memory", bytes, true],
];

function needed() {
  return page.view === "curves" ? picked() : page.view === "resources" ? SPEEDS.map(([name]) => name) : [];
}

function drawRuns() {
  const several = page.runs.length > 1;
  $("runs").replaceChildren(...page.runs.map((run) => {
    const dot = element("span", { class: "dot" }), state = page.found.get(run.name)?.state ?? (run.finished ? "finished" : "");
    dot.style.background = colour(run.index);
    const facts = [run.trainer, `step ${run.steps}`].filter(Boolean).join(", ");
    const parts = [several ? dot : null, element("b", { text: run.name }), element("span", { text: facts }),
      element("span", { class: "state-" + state, text: state })];
    if (!several) return element("div", { class: "run", title: run.path }, ...parts);
    return element("button", {
      class: "run", type: "button", title: run.path + ": show or hide", "aria-pressed": String(!page.hidden.has(run.name)),
      onclick: () => {
        if (!page.hidden.delete(run.name)) page.hidden.add(run.name);
        drawRuns();
        draw();
      },
    }, ...parts);
  }));
}

// The curves of a metric, one of each run that has it.
function seriesOf(name, smoothing) {
  return shownRuns().flatMap((run) => {
    const curve = page.found.get(run.name)?.curves?.[name];
    if (!curve || !curve.steps.length) return [];
    return [{ label: run.name, colour: colour(run.index), steps: curve.steps, values: curve.values,
      perPoint: curve.per_point, smoothing: curve.steps.length < 12 ? 0 : smoothing }];
  });
}

function drawCurves() {
  const wanted = picked(), every = names(), panel = new Map(page.panels.map((each) => [each.name, each]));
  $("picked").textContent = `${wanted.length} of ${every.length}`;
  for (const name of page.charts.keys()) if (!wanted.includes(name)) page.charts.delete(name);
  const cards = wanted.map((name) => {
    if (!page.charts.has(name)) {
      const { title, logarithmic, is_share: isShare } = panel.get(name) ?? {};
      page.charts.set(name, new Chart({ name, title: title ?? name, logarithmic, isShare, format: formatOf(name), inBytes: formatOf(name) === bytes }));
    }
    return page.charts.get(name);
  });
  place($("charts"), cards.map((chart) => chart.card));
  for (const [name, chart] of page.charts) chart.show(seriesOf(name, page.smoothing));
  if ($("picker").open) drawPicker();
}

function formatOf(name) {
  if (name.startsWith("memory/") || name === "perf/peak_memory") return bytes;
  return name.startsWith("time/") || name === "step_time" ? seconds : short;
}

// The children of an element, replaced only where they change, so that the pointer stays on what it is over.
function place(parent, children) {
  if (parent.children.length === children.length && children.every((child, i) => parent.children[i] === child)) return;
  parent.replaceChildren(...children);
}

function drawPicker() {
  const wanted = new Set(picked()), text = $("find").value.toLowerCase();
  const found = names().filter((name) => name.toLowerCase().includes(text));
  if ($("names").dataset.shown === JSON.stringify([found, [...wanted]])) return;
  $("names").dataset.shown = JSON.stringify([found, [...wanted]]);
  $("names").replaceChildren(...found.map((name) => {
    const box = element("input", { type: "checkbox", checked: wanted.has(name) });
    box.addEventListener("change", () => {
      const now = new Set(picked());
      if (box.checked) now.add(name);
      else now.delete(name);
      choose([...now]);
    });
    return element("label", {}, box, element("span", { text: name }));
  }), ...(found.length ? [] : [element("div", { class: "none", text: "no metric has this in its name" })]));
}

function choose(chosen) {
  page.picked = chosen;
  kept("metrics", chosen);
  draw();
  poll();
}

const speeds = new Map();

function drawResources() {
  const cards = SPEEDS.flatMap(([name, title, format, inBytes]) => {
    if (!speeds.has(name)) speeds.set(name, new Chart({ name, title, format, inBytes, fromZero: true }));
    const series = seriesOf(name, 0);
    speeds.get(name).show(series);
    return series.length ? [speeds.get(name).card] : [];
  });
  place($("speed"), cards);
  const tables = shownRuns().flatMap((run) => {
    const latest = page.found.get(run.name)?.latest ?? {}, tone = colour(run.index);
    const note = page.runs.length > 1 ? `${run.name}, step ${run.steps}` : `step ${run.steps}`;
    return [
      shares("Memory by region, peak", note, partsOf(latest, "memory/"), bytes, tone),
      shares("Time of a step by phase", note, partsOf(latest, "time/"), seconds, tone),
    ].filter(Boolean);
  });
  $("shares").replaceChildren(...tables);
  if (!cards.length && !tables.length) $("shares").replaceChildren(element("div", { class: "none", text: "No step yet." }));
}

function partsOf(latest, prefix) {
  const found = Object.entries(latest).filter(([name, value]) => name.startsWith(prefix) && value > 0);
  return found.map(([name, value]) => [name.slice(prefix.length), value]).sort((a, b) => b[1] - a[1]);
}

// A table of bars: the parts of a whole, the largest first.
function shares(title, note, parts, format, tone) {
  if (!parts.length) return null;
  const rows = parts.map(([name, value]) => {
    const meter = element("div", { class: "meter" });
    meter.style.width = (100 * value) / parts[0][1] + "%";
    meter.style.background = tone;
    return element("tr", {}, element("td", { text: name }), element("td", {}, meter), element("td", { text: format(value) }));
  });
  const heading = element("h2", {}, element("span", { text: title }), element("span", { text: note }));
  heading.firstChild.style.cssText = "color: inherit; font-weight: 600";
  return element("div", { class: "card shares" }, heading, element("table", {}, element("tbody", {}, ...rows)));
}

const completions = new Completions();

function draw() {
  if (page.view === "curves") drawCurves();
  if (page.view === "resources") drawResources();
}

// The newest values of every run, where its file has changed.
async function readCurves() {
  const wanted = needed();
  await Promise.all(page.runs.map(async (run) => {
    const before = page.found.get(run.name);
    const has = before && wanted.every((name) => name in before.curves || !before.names.includes(name));
    const query = { run: run.name, names: wanted.join(","), seen: has ? before.version : undefined };
    const now = await ask("curves", query);
    page.found.set(run.name, now.curves ? now : { ...before, state: now.state });
    run.steps = now.steps;
  }));
}

let asking = false, again = false;

async function poll() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  try {
    do {
      again = false;
      const runs = await ask("runs");
      page.runs = runs.map((run, index) => ({ ...run, index }));
      await readCurves();
      if (!page.picked && page.view === "curves" && usual().some((name) => !hasCurve(name))) await readCurves();
      drawRuns();
      draw();
      await completions.refresh(page.runs, page.view === "completions");
    } while (again);
    trouble(null);
  } catch (error) {
    trouble(error);
  } finally {
    asking = false;
    document.documentElement.dataset.ready = page.view;
  }
}

const hasCurve = (name) => page.runs.every((run) => {
  const found = page.found.get(run.name);
  return !found || name in found.curves || !found.names.includes(name);
});

function open() {
  const [view, query] = location.hash.slice(1).split("?");
  page.view = VIEWS.includes(view) ? view : "curves";
  for (const each of VIEWS) $(each).hidden = each !== page.view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#" + page.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (page.view === "completions") completions.go(new URLSearchParams(query));
  hideTip();
  draw();
  poll();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  drawRuns();
  draw();
  completions.draw();
}

const THEMES = ["auto", "light", "dark"];
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(kept("theme") ?? "auto") + 1) % THEMES.length];
  kept("theme", next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(kept("theme") ?? "auto"));
$("smoothing").value = page.smoothing;
$("smoothed").textContent = page.smoothing.toFixed(2);
$("smoothing").addEventListener("input", () => {
  page.smoothing = Number($("smoothing").value);
  kept("smoothing", page.smoothing);
  $("smoothed").textContent = page.smoothing.toFixed(2);
  draw();
});
$("picker").addEventListener("toggle", () => { if ($("picker").open) { drawPicker(); $("find").focus(); } });
$("find").addEventListener("input", drawPicker);
$("usual").addEventListener("click", () => choose(null));
document.addEventListener("click", (event) => { if (!$("picker").contains(event.target)) $("picker").open = false; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") $("picker").open = false; });
addEventListener("hashchange", open);
setTheme(kept("theme") ?? "auto");
ask("panels").then((panels) => { page.panels = panels; }).catch(trouble).finally(() => {
  open();
  setInterval(() => { if (!document.hidden) poll(); }, EVERY_MS);
});
