// The data, what all figures share, colours.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
const plotly = unpacked("plotly"), numbersOf = unpacked("numbers");
const data = JSON.parse(new TextDecoder().decode(await unpacked("data")));
// Numbers of three bytes, the upper ones of a float32: all lowest bytes come first, then the next ones.
const bytes = new Uint8Array(await numbersOf), count = bytes.length / 3, words = new Uint32Array(count);
for (let i = 0; i < count; i += 1) words[i] = (bytes[i] << 8) | (bytes[count + i] << 16) | (bytes[2 * count + i] << 24);
const pack = new Float32Array(words.buffer);
const numbers = (offset, length) => pack.subarray(offset, offset + length);

const every = (selector, within = document) => [...within.querySelectorAll(selector)];
const state = { runs: data.runs.map(() => true), layer: "", vectors: false, smoothing: 0, time: false };

// One line of a run over its steps, or null if it was not recorded.
function line(run, quantity, group, statistic) {
  const at = data.runs[run].series[quantity]?.[group]?.[data.statistics.indexOf(statistic)];
  if (at === undefined || at === null) return null;
  const length = data.runs[run].steps.length;
  if (Array.isArray(at)) return new Float32Array(length).fill(at[0]);
  return numbers(at, length);
}

// "max-abs" is the larger of |min| and |max|, as the paper plots it; a missing statistic falls back to the mean.
function lineOf(run, quantity, group, statistic) {
  if (statistic !== "max-abs")
    return line(run, quantity, group, statistic === "band" ? "median" : statistic) ?? line(run, quantity, group, "mean");
  const low = line(run, quantity, group, "min"), high = line(run, quantity, group, "max");
  if (!low || !high) return lineOf(run, quantity, group, "median")?.map(Math.abs) ?? null;
  return high.map((value, i) => Math.max(Math.abs(value), Math.abs(low[i])));
}

// The mean over some points to both sides; gaps stay gaps.
function smooth(values) {
  const reach = state.smoothing && 2 ** (state.smoothing - 1);
  if (!reach) return values;
  return Array.from(values, (value, i) => {
    if (!Number.isFinite(value)) return value;
    const near = values.slice(Math.max(i - reach, 0), i + reach + 1).filter(Number.isFinite);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

const shownRuns = () => data.runs.map((_, i) => i).filter((i) => state.runs[i]);
// The axis of lines: the time since the start, if it is chosen and all runs shown have it, or steps.
const haveTimes = () => shownRuns().every((run) => data.runs[run].times);
const isTimed = () => state.time && haveTimes();
function unitOfTime() {
  const longest = Math.max(...shownRuns().map((run) => data.runs[run].times.at(-1)));
  return [["hours", 3600], ["minutes", 60]].find(([, size]) => longest >= 2 * size) ?? ["seconds", 1];
}
// From the step of a run to its place on the axis.
function onAxis(run) {
  if (!isTimed()) return (step) => step;
  const { steps, times } = data.runs[run], [, size] = unitOfTime();
  return (step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    return (times[low] + ((times[high] - times[low]) * (step - steps[low])) / (steps[high] - steps[low])) / size;
  };
}
// Biases and gains are not in figures of all layers, unless they are asked for.
const visible = (groups) => (state.vectors ? groups : groups.filter((group) => !data.vectors.includes(group)));
const shownGroups = (run) => (state.layer ? data.runs[run].groups.filter((group) => group === state.layer) : visible(data.runs[run].groups));
const isOverlay = () => Boolean(state.layer) || visible(data.groups).length === 1;
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
// Where layers repeat in blocks, a figure of all has a line for each role, and one for each layer outside the blocks.
const FEW_LAYERS = 10;
function families() {
  const groups = visible(data.groups), roleOf = (group) => data.grid.roles[data.grid.places[group]?.[1]];
  return data.grid ? [...new Set(groups.map(roleOf).filter(Boolean)), ...groups.filter((group) => !roleOf(group))] : groups;
}
const isNamed = () => families().length <= FEW_LAYERS || data.grid;
function colourOf(name, run) {
  if (data.grid) return css(`--run-${families().indexOf(name) % 7}`);
  const names = isNamed() ? families() : visible(data.runs[run].groups);
  return depth(names.length > 1 ? names.indexOf(name) / (names.length - 1) : 0.4);
}
const dashOf = (name) => (data.grid ? runDash(families().indexOf(name)) : "solid");

// The lines of a run, one for each layer, or the median (or an extreme) over the blocks.
function linesOf(run, values, statistic) {
  const one = (group) => ({ run, name: group, layer: group, values: values(group) });
  const over = (lines) => lines[0].map((_, k) => {
    const known = lines.map((values) => values[k]).filter(Number.isFinite).sort((a, b) => a - b);
    return (statistic.startsWith("max") ? known.at(-1) : statistic === "min" ? known[0] : known[known.length >> 1]) ?? NaN;
  });
  const groups = shownGroups(run), single = (group) => !data.grid || state.layer || !data.grid.places[group];
  const roles = !data.grid || state.layer ? [] : data.grid.roles.map((role, r) => {
    const lines = groups.filter((group) => data.grid.places[group]?.[1] === r).map(values).filter(Boolean);
    return { run, name: role, values: lines.length ? over(lines) : null };
  });
  return [...roles, ...groups.filter(single).map(one)].filter((each) => each.values);
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
const shortened = (name, most) => (name.length > most ? `…${name.slice(1 - most)}` : name);
function label(group, most) {
  const place = data.grid?.places[group], name = common ? group.slice(0, -common) : group;
  return shortened(place ? `${data.grid.blocks[place[0]].match(/\d+$/)}.${data.grid.roles[place[1]]}` : name, most);
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
