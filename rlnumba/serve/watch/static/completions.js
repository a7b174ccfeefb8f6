// The completions of a step: prompts, rewards, advantages, turns with tool calls, and tokens by their values.

import { $, ask, element, hideTip, isDark, kept, short, showTip } from "./page.js";

const PAGE = 32;
// Columns of a line that are no reward, and are shown in another place or not at all.
const OWN = new Set(["step", "prompt", "completion", "finish_reason", "reward", "advantage", "ended", "environment", "index",
  "turns", "tool_calls", "tool_failures", "prompt_token_ids", "token_ids", "mask", "logprobs"]);

const ORANGE = [230, 110, 20], BLUE = [50, 130, 220], GREEN = [20, 160, 110];

// How a token is coloured: name -> {text, values of a line, strength in [-1, 1] of a value among all, tones}.
const COLOURS = {
  logprobs: { text: "log-prob", tones: [ORANGE, ORANGE], strength: (value, most) => value / most, marks: (most) => [-most, 0] },
  entropy: { text: "entropy", tones: [BLUE, BLUE], strength: (value, most) => value / most, marks: (most) => [0, most] },
  ratio: { text: "importance ratio", tones: [BLUE, ORANGE], strength: (value, most) => Math.log(value) / most,
    size: (value) => Math.abs(Math.log(value)), marks: (most) => [Math.exp(-most), Math.exp(most)] },
  advantage: { text: "advantage", tones: [ORANGE, GREEN], strength: (value, most) => value / most, marks: (most) => [-most, most] },
};

const rgba = ([r, g, b], strength) => `rgb(${r} ${g} ${b} / ${(Math.min(Math.abs(strength), 1) * (isDark() ? 0.75 : 0.6)).toFixed(3)})`;
const toneOf = (kind, strength) => rgba(COLOURS[kind].tones[strength < 0 ? 0 : 1], strength);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export class Completions {
  constructor() {
    Object.assign(this, { runs: [], run: null, step: null, steps: {}, total: 0, rows: [], tokens: new Map(), shown: "" });
    this.follows = true;
    this.visible = false;
    this.kind = kept("colour");
    $("run").addEventListener("change", () => { this.run = $("run").value; this.follows = true; this.load(); });
    $("step").addEventListener("change", () => this.choose(Number($("step").value)));
    $("slide").addEventListener("input", () => { $("step").value = $("slide").value; });
    $("slide").addEventListener("change", () => this.choose(Number($("slide").value)));
    $("before").addEventListener("click", () => this.choose(this.steps.before));
    $("after").addEventListener("click", () => this.choose(this.steps.after));
    $("follow").addEventListener("change", () => { this.follows = $("follow").checked; this.load(); });
    $("colour").addEventListener("change", () => { this.kind = kept("colour", $("colour").value); this.draw(); });
    $("more").addEventListener("click", () => this.more());
    document.addEventListener("keydown", (event) => {
      if (!this.visible || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "ArrowLeft") this.choose(this.steps.before);
      if (event.key === "ArrowRight") this.choose(this.steps.after);
    });
    const list = $("list");
    list.addEventListener("pointermove", (event) => this.point(event));
    list.addEventListener("pointerleave", hideTip);
  }

  // The state of an address like #completions?run=a&step=7.
  go(query) {
    if (query.get("run")) this.run = query.get("run");
    if (query.get("step")) [this.step, this.follows] = [Number(query.get("step")), false];
  }

  async refresh(runs, visible) {
    this.visible = visible;
    this.runs = runs.map((run) => run.name);
    if (!this.runs.includes(this.run)) this.run = this.runs[0];
    if (visible) await this.load(true);
  }

  choose(step) {
    if (!isNumber(step)) return;
    this.follows = false;
    this.step = step;
    this.load();
  }

  // Read the chosen step, which a resumed run may have removed. quiet: only if the newest step has changed.
  async load(quiet = false) {
    const steps = await ask("steps", { run: this.run, step: this.follows ? null : this.step });
    const same = quiet && JSON.stringify([this.run, steps.at]) === this.shown;
    this.steps = steps;
    if (same && this.follows === $("follow").checked) {
      this.drawSteps();
      // A step that is being written, or tokens that come after it.
      const { total } = await ask("completions", { run: this.run, step: steps.at, limit: 0 });
      if (total === this.total && (this.tokens.size || this.looked > 3)) return;
      this.looked++;
    } else {
      this.looked = 0;
    }
    this.step = steps.at;
    this.shown = JSON.stringify([this.run, steps.at]);
    if (steps.at === null) {
      Object.assign(this, { total: 0, rows: [], tokens: new Map() });
    } else {
      const count = same ? Math.max(this.rows.length, PAGE) : PAGE;
      const [found, tokens] = await Promise.all([
        ask("completions", { run: this.run, step: steps.at, limit: Math.min(count, 1000) }),
        ask("tokens", { run: this.run, step: steps.at, limit: 1000 }),
      ]);
      this.total = found.total;
      this.rows = found.rows;
      this.tokens = new Map();
      for (const row of tokens.rows) {
        // Of several passes over a completion, the first.
        if (row.completion_step === steps.at && !this.tokens.has(row.index)) this.tokens.set(row.index, row);
      }
    }
    this.draw();
  }

  async more() {
    const found = await ask("completions", { run: this.run, step: this.step, offset: this.rows.length, limit: PAGE });
    this.rows.push(...found.rows);
    this.draw();
  }

  drawSteps() {
    const { first, last, before, after, at } = this.steps;
    $("which").hidden = this.runs.length < 2;
    if ($("run").dataset.names !== JSON.stringify(this.runs)) {
      $("run").dataset.names = JSON.stringify(this.runs);
      $("run").replaceChildren(...this.runs.map((name) => element("option", { value: name, text: name })));
    }
    $("run").value = this.run;
    for (const [id, value] of [["step", at], ["slide", at]]) {
      $(id).min = first ?? 0;
      $(id).max = last ?? 0;
      if (document.activeElement !== $(id)) $(id).value = value ?? "";
    }
    $("before").disabled = before === null || before === undefined;
    $("after").disabled = after === null || after === undefined;
    $("follow").checked = this.follows;
    for (const child of $("steps").children) if (child.id !== "which" && child.id !== "colouring") child.hidden = at === null;
  }

  draw() {
    this.drawSteps();
    hideTip();
    const kinds = Object.keys(COLOURS).filter((kind) => [...this.tokens.values()].some((row) => row[kind]));
    $("colouring").hidden = !kinds.length;
    $("colour").replaceChildren(element("option", { value: "none", text: "none" }),
      ...kinds.map((kind) => element("option", { value: kind, text: COLOURS[kind].text })));
    // Until the reader chooses, turns are shown as turns, and texts by their log-probs.
    const usual = this.rows.some((row) => Array.isArray(row.completion)) ? "none" : "logprobs";
    const kind = kinds.includes(this.kind ?? usual) ? (this.kind ?? usual) : "none";
    $("colour").value = kind;
    this.scale = kind === "none" ? null : this.scaleOf(kind);
    this.drawLegend(kind);
    const known = this.rows.map((row) => row.reward).filter(isNumber);
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    const of = this.rows.length < this.total ? `${this.total} completions, the first ${this.rows.length} shown` : `${this.total} completions`;
    $("summary").textContent = this.step === null || this.step === undefined ? ""
      : `Step ${this.step}: ${of}${known.length ? `; mean reward${this.rows.length < this.total ? " of these" : ""} ${short(mean)}` : ""}`;
    if (!this.rows.length) {
      $("list").replaceChildren(element("div", { class: "none", text: this.step === null ? "No completions yet: grpo, rloo and ppo write them." : "" }));
    } else {
      $("list").replaceChildren(...this.groups().map((group) => this.drawGroup(group, kind)));
    }
    $("more").hidden = this.rows.length >= this.total || !this.rows.length;
  }

  // The value that has the strongest colour: of the largest ones, with a hundredth left out.
  scaleOf(kind) {
    const size = COLOURS[kind].size ?? Math.abs, sizes = [];
    for (const row of this.tokens.values()) {
      (row[kind] ?? []).forEach((value, i) => { if (isNumber(value) && row.mask?.[i] !== 0) sizes.push(size(value)); });
    }
    sizes.sort((a, b) => a - b);
    return sizes[Math.ceil((sizes.length - 1) * 0.99)] || 1e-6;
  }

  drawLegend(kind) {
    $("legend").hidden = kind === "none";
    if (kind === "none") return;
    const [low, high] = COLOURS[kind].marks(this.scale), strip = element("i");
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => {
      const strength = kind === "logprobs" ? share - 1 : kind === "entropy" ? share : 2 * share - 1;
      return toneOf(kind, strength);
    });
    strip.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    $("legend").replaceChildren(element("span", { text: COLOURS[kind].text }), element("span", { text: short(low) }), strip, element("span", { text: short(high) }));
  }

  // Neighbouring rows of one prompt: [{prompt, rows: [[row, index]]}].
  groups() {
    const found = [];
    let last;
    this.rows.forEach((row, index) => {
      const key = JSON.stringify(row.prompt);
      if (key !== last) found.push({ prompt: row.prompt, rows: [] });
      last = key;
      found.at(-1).rows.push([row, index]);
    });
    return found;
  }

  drawGroup({ prompt, rows }, kind) {
    const ask = element("div", { class: "ask clip" }, ...turnsOf(prompt, "prompt"));
    return element("article", { class: "card prompt" }, ask, ...rows.map(([row, index]) => this.drawRow(row, index, kind)));
  }

  drawRow(row, index, kind) {
    const line = (name, value, tone) => element("div", { title: name },
      element("span", { class: "name", text: name }), element("span", { class: tone, text: value }));
    const head = element("div", {}, element("span", { class: "name", text: "reward" }), element("b", { text: short(row.reward) }));
    const tone = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : undefined;
    const sign = row.advantage > 0 ? "+" : "";
    const lines = isNumber(row.advantage) ? [line("advantage", sign + short(row.advantage), tone)] : [];
    const others = Object.entries(row).filter(([name, value]) => !OWN.has(name) && isNumber(value));
    if (others.length !== 1 || others[0][1] !== row.reward) lines.push(...others.map(([name, value]) => line(name, short(value))));
    const ended = row.ended ?? row.finish_reason;
    if (ended && ended !== "stop") lines.push(line("ended by", ended, "down"));
    if (isNumber(row.turns)) lines.push(line("turns", `${row.turns}, ${row.tool_calls ?? 0} calls`));
    if (row.tool_failures) lines.push(line("failed calls", String(row.tool_failures), "down"));
    const tokens = kind === "none" ? null : this.tokens.get(index);
    const body = tokens ? [this.drawTokens(tokens, kind)] : turnsOf(row.completion, "");
    return element("div", { class: "answer" }, element("div", { class: "score" }, head, ...lines),
      element("div", { class: "clip" }, ...body));
  }

  drawTokens(row, kind) {
    const spans = row.tokens.map((text, i) => {
      const span = element("span", { class: row.mask?.[i] === 0 ? "token given" : "token", text });
      const value = row[kind]?.[i];
      if (isNumber(value) && row.mask?.[i] !== 0) span.style.background = toneOf(kind, COLOURS[kind].strength(value, this.scale));
      span.tokenOf = [row, i];
      return span;
    });
    return element("div", { class: "text" }, ...spans);
  }

  point(event) {
    if (!event.target.tokenOf) {
      hideTip();
      return;
    }
    const [row, i] = event.target.tokenOf, facts = [];
    if (row.mask?.[i] === 0) facts.push([null, "not trained on", ""]);
    for (const [kind, { text }] of Object.entries(COLOURS)) if (row[kind]) facts.push([null, text, short(row[kind][i])]);
    if (row.sampling_logprobs) facts.push([null, "log-prob when sampled", short(row.sampling_logprobs[i])]);
    if (row.token_ids) facts.push([null, "token id", String(row.token_ids[i])]);
    showTip(event.clientX, event.clientY, JSON.stringify(row.tokens[i]), facts);
  }
}

// A text, or messages turn by turn, as elements. role: that of a plain text.
function turnsOf(value, role) {
  if (Array.isArray(value)) return value.flatMap(messageOf);
  const text = textOf(value);
  const shown = text === "" ? element("div", { class: "text empty", text: "empty" }) : element("div", { class: "text", text });
  return role ? [element("div", { class: "turn" }, element("div", { class: "role", text: role }), shown)] : [shown];
}

// Content is a text, null, or parts of which those of type text have one.
function textOf(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content)) return content.map((part) => (typeof part?.text === "string" ? part.text : JSON.stringify(part))).join("");
  return JSON.stringify(content);
}

function messageOf(message) {
  if (typeof message !== "object" || message === null) return [element("div", { class: "text", text: JSON.stringify(message) })];
  const role = [message.role, message.role === "tool" ? message.name : null].filter((text) => typeof text === "string").join(" ");
  const body = element("div");
  if (message.reasoning_content) {
    body.append(element("details", {}, element("summary", { text: "reasoning" }), element("div", { class: "text", text: textOf(message.reasoning_content) })));
  }
  const text = textOf(message.content), calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  if (text !== "" || (!calls.length && !message.reasoning_content)) {
    body.append(element("div", { class: text === "" ? "text empty" : "text", text: text === "" ? "empty" : text }));
  }
  for (const call of calls) {
    const { name, arguments: given } = call?.function ?? call ?? {};
    const text = typeof given === "string" ? given : Object.entries(given ?? {}).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ");
    body.append(element("div", { class: "call" }, element("b", { text: textOf(name) }), `(${text})`));
  }
  return [element("div", { class: message.role === "tool" ? "turn tool" : "turn" }, element("div", { class: "role", text: role }), body)];
}
