// A line chart on a canvas: curves of several runs over steps, raw values light and their moving average, with a tip.

import { element, hideTip, short, showTip, styled } from "./page.js";

const RIGHT = 10, TOP = 10, BOTTOM = 22;

// Exponential moving average, as TensorBoard's: weights decay by `weight` a point, and sum to 1 from the first on.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

// Round numbers between two bounds, about `count` of them.
export function ticks(low, high, count, inBytes = false) {
  const rough = (high - low) / count, base = inBytes ? 2 : 10, power = base ** Math.floor(Math.log(rough) / Math.log(base) + 1e-9);
  const unit = (inBytes ? [1, 2] : [1, 2, 5, 10]).map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / unit - 1e-9); k * unit <= high + unit * 1e-9; k++) found.push(Number((k * unit).toPrecision(12)));
  return found;
}

export class Chart {
  // options: title, format (number -> text), logarithmic, isShare: drawn from 0 to 1 if all values are in it, inBytes,
  // fromZero: drawn from 0 to a bound that a few outliers, as the first step that compiles, may pass.
  constructor(options) {
    this.options = { format: short, ...options };
    this.series = [];
    this.value = element("span", { class: "value" });
    this.canvas = element("canvas", { role: "img", "aria-label": options.title });
    const title = element("span", { text: options.title, title: options.name ?? options.title });
    this.card = element("div", { class: "card chart" }, element("h2", {}, title, this.value), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.pointed = null; hideTip(); this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // series: [{label, colour, steps, values, smoothing, perPoint}]
  show(series) {
    this.series = series.map((each) => {
      const usable = this.options.logarithmic ? each.values.map((v) => (v > 0 ? v : null)) : each.values;
      return { ...each, raw: usable, trend: smooth(usable, each.smoothing) };
    });
    const ends = this.series.map((each) => each.values.findLast((value) => value !== null));
    this.value.textContent = ends.length === 1 && ends[0] !== undefined ? this.options.format(ends[0]) : "";
    this.draw();
  }

  bounds() {
    const xs = [], ys = [];
    for (const { steps, raw } of this.series) {
      steps.forEach((step, i) => { if (raw[i] !== null) { xs.push(step); ys.push(raw[i]); } });
    }
    if (!xs.length) return null;
    const lowest = (list) => list.reduce((a, b) => (a < b ? a : b)), highest = (list) => list.reduce((a, b) => (a > b ? a : b));
    let [x0, x1, y0, y1] = [lowest(xs), highest(xs), lowest(ys), highest(ys)];
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    const log = this.options.logarithmic && y1 / y0 > 20;
    if (log) {
      [y0, y1] = [Math.log10(y0), Math.log10(y1)];
    } else {
      if (this.options.isShare && y0 >= 0 && y1 <= 1) [y0, y1] = [0, 1];
      else if (this.options.fromZero && y0 > 0) y0 = 0;
      const sorted = Float64Array.from(ys).sort(), usual = sorted[Math.floor((sorted.length - 1) * 0.97)];
      if (this.options.fromZero && sorted.length > 20 && usual > 0 && y1 > 3 * usual) y1 = 1.5 * usual;
      const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
      [y0, y1] = [this.options.fromZero && y0 === 0 ? 0 : y0 - pad, y1 + pad];
    }
    return { x0, x1, y0, y1, log };
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas, ratio = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d"), bounds = this.bounds();
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    const soft = styled("--soft"), line = styled("--line");
    if (!bounds) {
      pen.fillStyle = soft;
      pen.fillText("no values yet", 8, height / 2);
      return;
    }
    const { x0, x1, y0, y1, log } = bounds;
    let marks = ticks(y0, y1, 4, this.options.inBytes);
    if (log) {
      const powers = marks.filter(Number.isInteger);
      marks = powers.length > 1 ? powers : marks;
    }
    const labels = marks.map((mark) => this.options.format(log ? 10 ** mark : mark));
    const LEFT = 8 + Math.ceil(Math.max(28, ...labels.map((label) => pen.measureText(label).width)));
    const x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (((log ? Math.log10(value) : value) - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    this.x = x;
    pen.lineWidth = 1;
    pen.fillStyle = soft;
    pen.strokeStyle = line;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    marks.forEach((mark, i) => {
      const place = Math.round(y(log ? 10 ** mark : mark)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, place);
      pen.lineTo(width - RIGHT, place);
      pen.stroke();
      pen.fillText(labels[i], LEFT - 7, place);
    });
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const whole = ticks(x0, x1, Math.max(2, Math.floor((width - LEFT) / 60))).filter(Number.isInteger);
    for (const mark of whole) pen.fillText(short(mark), Math.min(x(mark), width - RIGHT - 8), height - 6);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 4, TOP - 4, width - LEFT - RIGHT + 8, height - TOP - BOTTOM + 8);
    pen.clip();
    for (const { steps, raw, trend, colour, smoothing } of this.series) {
      pen.strokeStyle = pen.fillStyle = colour;
      if (smoothing) this.path(pen, steps, raw, x, y, 1, 0.28);
      this.path(pen, steps, trend, x, y, 1.8, 1);
    }
    pen.restore();
    if (this.pointed !== null && this.pointed !== undefined) {
      pen.strokeStyle = soft;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x(this.pointed), TOP);
      pen.lineTo(x(this.pointed), height - BOTTOM);
      pen.stroke();
    }
  }

  path(pen, steps, values, x, y, width, alpha) {
    pen.lineWidth = width;
    pen.globalAlpha = alpha;
    pen.lineJoin = "round";
    pen.beginPath();
    let known = 0, open = false;
    steps.forEach((step, i) => {
      if (values[i] === null) return;
      known++;
      if (open) pen.lineTo(x(step), y(values[i]));
      else pen.moveTo(x(step), y(values[i]));
      open = true;
    });
    pen.stroke();
    if (known < 12) {
      steps.forEach((step, i) => {
        if (values[i] === null) return;
        pen.beginPath();
        pen.arc(x(step), y(values[i]), 2.5, 0, 7);
        pen.fill();
      });
    }
    pen.globalAlpha = 1;
  }

  // The nearest point of every curve to the pointer.
  point(event) {
    if (!this.x) return;
    const at = event.offsetX, rows = [];
    let nearest = null;
    for (const { steps, values, trend, colour, label, smoothing, perPoint } of this.series) {
      let best = -1;
      steps.forEach((step, i) => {
        if (values[i] !== null && (best < 0 || Math.abs(this.x(step) - at) < Math.abs(this.x(steps[best]) - at))) best = i;
      });
      if (best < 0) continue;
      if (nearest === null || Math.abs(this.x(steps[best]) - at) < Math.abs(this.x(nearest) - at)) nearest = steps[best];
      const text = this.options.format(values[best]);
      const mean = smoothing && trend[best] !== null ? ` (${this.options.format(trend[best])})` : "";
      rows.push([colour, label + (perPoint > 1 ? `, mean of ${perPoint} steps` : ""), text + mean]);
    }
    if (nearest === null) return;
    this.pointed = nearest;
    this.draw();
    showTip(event.clientX, event.clientY, `step ${nearest}`, rows);
  }
}
