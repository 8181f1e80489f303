// The data, what all figures share, colours.
const data = JSON.parse(document.getElementById("data").textContent);
const every = (selector, within = document) => [...within.querySelectorAll(selector)];
const state = { runs: data.runs.map(() => true), layer: "" };

// Numbers of three bytes, the upper ones of a float32: number i of the pack is at the characters 4i to 4i + 4.
function numbers(offset, length) {
  const bytes = atob(data.pack.slice(4 * offset, 4 * (offset + length)));
  const words = new Uint32Array(length);
  for (let i = 0, k = 0; i < length; i += 1, k += 3)
    words[i] = (bytes.charCodeAt(k) << 8) | (bytes.charCodeAt(k + 1) << 16) | (bytes.charCodeAt(k + 2) << 24);
  return new Float32Array(words.buffer);
}

const decoded = new Map();

// One line of a run over its steps, or null if it was not recorded.
function line(run, quantity, group, statistic) {
  const at = data.runs[run].series[quantity]?.[group]?.[data.statistics.indexOf(statistic)];
  if (at === undefined || at === null) return null;
  const length = data.runs[run].steps.length;
  if (Array.isArray(at)) return new Float32Array(length).fill(at[0]);
  if (!decoded.has(at)) decoded.set(at, numbers(at, length));
  return decoded.get(at);
}

// "max-abs" is the larger of |min| and |max|, as the paper plots it; a missing statistic falls back to the mean.
function lineOf(run, quantity, group, statistic) {
  if (statistic !== "max-abs")
    return line(run, quantity, group, statistic === "band" ? "median" : statistic) ?? line(run, quantity, group, "mean");
  const low = line(run, quantity, group, "min"), high = line(run, quantity, group, "max");
  if (!low || !high) return lineOf(run, quantity, group, "median")?.map(Math.abs) ?? null;
  return high.map((value, i) => Math.max(Math.abs(value), Math.abs(low[i])));
}

const shownRuns = () => data.runs.map((_, i) => i).filter((i) => state.runs[i]);
const shownGroups = (run) => data.runs[run].groups.filter((group) => !state.layer || group === state.layer);
const hasQuantity = (run, quantity) => Object.keys(data.runs[run].series[quantity] ?? {}).some((group) => group);
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColour = (run) => css(`--run-${run % 7}`);
// Dashed lines are reserved for the nominal rate and predictions.
const runDash = (run) => ["solid", "dot", "dashdot", "longdashdot"][Math.floor(run / 7) % 4];

// Viridis: even steps of lightness, from the first layer to the last.
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const channels = (hex) => {
  const full = hex.length === 4 ? [...hex].map((digit) => digit + digit).join("").slice(1) : hex;
  return [1, 3, 5].map((i) => parseInt(full.slice(i, i + 2), 16));
};
function viridis(t) {
  const at = Math.min(Math.max(t, 0), 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const one = channels(VIRIDIS[i]), two = channels(VIRIDIS[i + 1]);
  return `rgb(${one.map((value, k) => Math.round(value + (at - i) * (two[k] - value))).join(",")})`;
}
function depth(t) {
  const low = Number(css("--depth-low")), high = Number(css("--depth-high"));
  return viridis(low + (high - low) * t);
}
// Few layers are named below a figure, each in its colour; with many, colours run from the first to the last of each run.
const FEW_LAYERS = 10;
function layerColour(group, run) {
  const groups = data.groups.length > FEW_LAYERS ? data.runs[run].groups : data.groups;
  return depth(groups.length > 1 ? groups.indexOf(group) / (groups.length - 1) : 0.4);
}
// A mixture of two colours, opaque, so that pieces of a line may overlap.
function mixed(colour, ground, share) {
  const one = channels(colour), two = channels(ground);
  return `rgb(${one.map((value, i) => Math.round(share * value + (1 - share) * two[i])).join(",")})`;
}
function faded(colour, alpha) {
  const of = colour.startsWith("#") ? channels(colour) : colour.match(/\d+/g);
  return `rgba(${of.join(",")},${alpha})`;
}

// Short names of layers: without an ending that all have in common, and with the part that distinguishes them.
const common = data.groups.length > 1 && data.groups.every((group) => group.endsWith(".weight")) ? ".weight".length : 0;
function label(group, most) {
  const name = common ? group.slice(0, -common) : group;
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}
const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(most - 1, 3))}…` : text);

// For text only, not for attributes: Plotly shows &quot; literally.
const escapeHtml = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const titleOf = (quantity) => data.quantities[quantity]?.title ?? quantity.replaceAll("_", " ");
const symbolOf = (quantity) => data.quantities[quantity]?.symbol ?? "";
// Plotly understands a little HTML; exponents become superscripts.
const plain = (text) => escapeHtml(text).replace("^e", "<sup>e</sup>").replace("^⊥", "<sup>⊥</sup>");
const axisTitle = (quantity) => {
  const symbol = symbolOf(quantity);
  return symbol && symbol !== `(${titleOf(quantity)[1]})` ? `${titleOf(quantity)}, ${plain(symbol)}` : titleOf(quantity);
};
function short(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-3 ? value.toExponential(1).replace(".0e", "e").replace("e+", "e") : String(Number(value.toPrecision(3)));
}
