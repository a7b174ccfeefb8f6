// What all views share: the server's answers, elements, numbers, the tip at the pointer, colours.

export const $ = (id) => document.getElementById(id);

// An element with text and children. Text of runs gets into the page by textContent alone, never as HTML.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// The answer of a route as an object. Throws an Error with the server's message.
export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
  const text = new URLSearchParams(given).toString();
  let response;
  try {
    // Not of the page's own address, which may have a name and a key in it.
    response = await fetch(location.origin + "/api/" + path + (text ? "?" + text : ""));
  } catch {
    throw new Error("The server does not answer: rlnumba watch may have ended.");
  }
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function trouble(error) {
  $("trouble").textContent = error ? error.message : "";
  $("trouble").hidden = !error;
}

// A number in few characters; whole ones below a million keep all digits.
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (Number.isInteger(value)) return String(value);
  if (size >= 1e5) return Math.round(value).toString();
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0*e-/, "e−").replace(/^-/, "−");
  return String(Number(value.toPrecision(4))).replace(/^-/, "−");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  if (value === 0) return "0";
  return (unit && value < 100 ? Number(value.toPrecision(3)) : Math.round(value)) + " " + units[unit];
}

export const seconds = (value) => (value === 0 ? "0" : value >= 1 ? Number(value.toPrecision(3)) + " s" : short(Number((value * 1000).toPrecision(3))) + " ms");

// Okabe and Ito's colours, which colour blind readers can tell apart; lighter ones on a dark page.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b8578f", "#a87800", "#2f8fc4", "#444444"];
const DARK = ["#56b4e9", "#f0894a", "#35c79a", "#e08fc0", "#e6b73c", "#8fb7ff", "#c8ccd2"];

export const isDark = () => getComputedStyle($("theme")).colorScheme === "dark"
  || (document.documentElement.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

export const colour = (index) => (isDark() ? DARK : LIGHT)[index % LIGHT.length];

const resolver = document.createElement("canvas").getContext("2d");

// A colour of the style sheet, as a canvas takes it.
export function styled(name) {
  const probe = element("i", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  resolver.fillStyle = found;
  return resolver.fillStyle;
}

// Show rows of [colour or null, text, number] beside a place of the window.
export function showTip(x, y, title, rows) {
  const tip = $("tip");
  tip.replaceChildren(element("div", { text: title }), ...rows.map(([tone, text, value]) => {
    const dot = tone === null ? null : element("span", { class: "dot" });
    if (dot) dot.style.background = tone;
    return element("div", {}, dot, element("span", { text }), element("b", { text: value }));
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14) + "px";
  tip.style.top = Math.max(8, Math.min(y + 14, innerHeight - height - 8)) + "px";
}

export const hideTip = () => { $("tip").hidden = true; };

// What the reader has chosen, kept by this browser alone.
export function kept(name, value) {
  try {
    if (value !== undefined) localStorage.setItem("rlnumba." + name, JSON.stringify(value));
    return JSON.parse(localStorage.getItem("rlnumba." + name));
  } catch {
    return null;
  }
}
