// Panels beside each other or, on a narrow screen, below each other: axes, headings, drops of the schedule.
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const CONFIG = {
  displaylogo: false, responsive: false, plotlyServerURL: "",  // nothing leaves the page
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "sendChartToCloud", "sendDataToCloud"],
  toImageButtonOptions: { scale: 2 },
};

const isNarrow = (place) => place.clientWidth < 560;
function columnsFor(place, count, least = 290) {
  return Math.max(1, Math.min(count, Math.floor((place.clientWidth - 60) / least)));
}

// panels: [{ title, colour, xtitle, ytitle }]; together: one scale for all.
function frame(place, panels, { columns, height: wanted = 250, log = false, together = true, xtitle = "step", ytitle = "" } = {}) {
  const height = isNarrow(place) && panels.length > 1 ? 0.7 * wanted : wanted;  // a phone shows panels below each other
  const across = columns ?? columnsFor(place, panels.length);
  const down = Math.ceil(panels.length / across);
  const headed = panels.some((panel) => panel.title);
  const margin = { l: ytitle || !together ? 70 : 54, r: 12, t: headed ? 34 : 12, b: 46 };
  const gapX = together ? 26 : 62, gapY = panels.some((panel, i) => i >= across && panel.title) ? 76 : 48;
  const inner = place.clientWidth - margin.l - margin.r;
  const total = down * height + (down - 1) * gapY;
  const layout = {
    height: total + margin.t + margin.b, width: place.clientWidth, margin, showlegend: false, shapes: [], annotations: [],
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: FONT, size: 13, color: css("--soft") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { family: FONT, color: css("--ink") }, align: "left" },
    modebar: { bgcolor: css("--card"), color: css("--soft"), activecolor: css("--ink") },
    hoverdistance: -1, dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls
  };
  panels.forEach((panel, i) => {
    const row = Math.floor(i / across), column = i % across, n = i ? i + 1 : "";
    const wide = (inner - (across - 1) * gapX) / across;
    const left = (column * (wide + gapX)) / inner, top = 1 - (row * (height + gapY)) / total;
    const lines = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, showline: true, ticks: "outside",
                    tickcolor: css("--line"), ticklen: 4, automargin: false };
    const last = i + across >= panels.length;
    layout[`xaxis${n}`] = { ...lines, domain: [left, left + wide / inner], anchor: `y${n}`, showgrid: false, spikecolor: css("--soft"), spikethickness: -1,
                            title: { text: last ? panel.xtitle ?? xtitle : "", standoff: 6, font: { size: 12.5 } } };
    layout[`yaxis${n}`] = { ...lines, domain: [top - height / total, top], anchor: `x${n}`,
                            type: log ? "log" : "linear", exponentformat: "power", minexponent: 2,
                            showticklabels: !together || column === 0, nticks: 7,
                            title: { text: column === 0 || !together ? panel.ytitle ?? ytitle : "", standoff: 8, font: { size: 12.5 } } };
    if (together && i) layout[`yaxis${n}`].matches = "y";
    if (panel.title)
      layout.annotations.push({ text: `<b>${escapeHtml(cut(panel.title, Math.floor(wide / 8.4)))}</b>`, xref: `x${n} domain`, yref: `y${n} domain`, x: 0, y: 1,
                                xanchor: "left", yanchor: "bottom", yshift: 7, showarrow: false,
                                font: { size: 14, color: panel.colour ?? css("--ink") } });
  });
  return layout;
}

const axes = (i) => ({ xaxis: `x${i ? i + 1 : ""}`, yaxis: `y${i ? i + 1 : ""}` });

// Points that a scale can show. What is divided by a prediction of 0 is infinite.
function points(steps, values, log, other) {
  const x = [], y = [], z = [];
  for (let i = 0; i < values.length; i += 1) {
    const fits = (value) => Number.isFinite(value) && (!log || value > 0), good = fits(values[i]) && (!other || fits(other[i]));
    if (good) { x.push(steps[i]); y.push(values[i]); if (other) z.push(other[i]); }
  }
  return { x, y, z };
}

const FEW_POINTS = 60;  // up to which each is marked
function curve(run, values, { steps = data.runs[run].steps, panel = 0, colour, width = 1.7, dash = "solid", name = "", extra = "", log = false, shape = "linear", raw = false }) {
  const { x, y } = points(steps, raw ? values : smooth(values), log);
  return { run, x, y, name, extra, mode: x.length > FEW_POINTS || dash === "dash" ? "lines" : "lines+markers", marker: { color: colour, size: 4 }, line: { color: colour, width, dash, shape }, ...axes(panel), type: "scatter", meta: name };
}

// The pointer shows all lines of a panel at its step, or the nearest one if there are too many for a list.
const MOST_LISTED = 24;
function hover(traces, layout) {
  const own = traces.filter(({ extra }) => extra !== undefined), beside = (one) => own.filter(({ yaxis }) => yaxis === one.yaxis);
  const listed = own.every((each) => beside(each).length <= MOST_LISTED);
  const timed = isTimed(), step = timed ? " (step %{customdata})" : "", at = timed ? `%{x:.3~g} ${unitOfTime()[0]}` : "step %{x}";
  layout.hovermode = listed ? "x unified" : "closest";
  for (const each of own) {
    const twins = beside(each).filter(({ name }) => name === each.name).length > 1;
    const name = escapeHtml(listed && twins ? `${each.name}, ${each.extra}` : each.name);
    each.hovertemplate = listed ? `%{y:.3~g}${step}<extra>${name}</extra>` : `<b>${name}</b><br>${at}${step}: %{y:.3~g}<extra>${escapeHtml(each.extra)}</extra>`;
  }
  for (const axis of axisNames(layout, "x")) layout[axis].unifiedhovertitle = { text: at };
}

// Bands of several runs overlap.
const veil = (runs) => Math.min(0.17, 0.85 / runs);
function band(run, low, high, { panel = 0, colour, alpha = veil(1), log = false }) {
  const { x, y, z } = points(data.runs[run].steps, smooth(low), log, smooth(high));
  const edge = { run, x, mode: "lines", line: { width: 0, color: colour }, hoverinfo: "skip", type: "scatter", ...axes(panel) };
  return [{ ...edge, y }, { ...edge, y: z, fill: "tonexty", fillcolor: faded(colour, alpha) }];
}

// Vertical lines at jumps of the nominal rate.
function markDrops(layout, run, panel, { colour, label = false }) {
  const { xaxis, yaxis } = axes(panel);
  for (const drop of data.runs[run].drops) {
    const x = onAxis(run)(drop.step);
    layout.shapes.push({ type: "line", xref: xaxis, yref: `${yaxis} domain`, x0: x, x1: x, y0: 0, y1: 1,
                         line: { color: colour, width: 1, dash: "dot" }, opacity: 0.6, layer: "below" });
    if (label)
      layout.annotations.push({ jump: xaxis, xref: xaxis, yref: `${yaxis} domain`, x, y: 1, yanchor: "top", xanchor: "left",
                                text: `η×${short(drop.factor)}`, showarrow: false, xshift: 1, font: { size: 11, color: css("--soft") } });
  }
}

function markBound(layout, panel, value, text, log) {
  const { xaxis, yaxis } = axes(panel);
  layout.shapes.push({ type: "line", xref: `${xaxis} domain`, yref: yaxis, x0: 0, x1: 1, y0: value, y1: value,
                       line: { color: css("--bad"), width: 1.5, dash: "dash" } });
  if (text)
    layout.annotations.push({ xref: `${xaxis} domain`, yref: yaxis, x: 1, y: log ? Math.log10(value) : value, xanchor: "right",
                              yanchor: "bottom", text, showarrow: false, font: { size: 11.5, color: css("--bad") } });
}

const axisNames = (layout, letter) => Object.keys(layout).filter((key) => key.startsWith(`${letter}axis`));

// Ticks of a logarithmic axis: powers of ten, or 1, 2, 5 in between where the range is short.
function logTicks(low, high, most = 7) {
  if (high - low < 0.7) return { tickformat: ".3~g" };
  const every = Math.max(1, Math.ceil((high - low) / 6)), parts = 3 * (high - low) < most ? [1, 2, 5] : [1], tickvals = [], ticktext = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1)
    if (power % every === 0)
      for (const part of parts) {
        tickvals.push(part * 10 ** power);
        ticktext.push(parts.length > 1 ? short(part * 10 ** power) : power === 0 ? "1" : `10<sup>${String(power).replace("-", "−")}</sup>`);
      }
  return { tickmode: "array", tickvals, ticktext };
}

const FEW_FIRST = 10;  // points up to which the first one counts for a range
const LABEL = 46;  // pixels that the label of a jump takes

// All panels over the same steps or the same time; logarithmic ranges leave out the last percent that runs off towards zero,
// and below everything else the first step, which a warm-up can make smaller by orders of magnitude.
function fit(traces, layout, bounds) {
  const timed = isTimed(), ends = (i) => shownRuns().map((run) => onAxis(run)(data.runs[run].steps.at(i)));
  let first = Math.min(...ends(0)), last = Math.max(...ends(-1));
  if (timed) traces.forEach((each) => { each.customdata = each.x; each.x = each.x.map(onAxis(each.run)); });
  if (first === last) { first -= 1; last += 1; }
  for (const name of axisNames(layout, "x")) {
    layout[name].range = [first - 0.004 * (last - first), last + 0.012 * (last - first)];
    if (timed && layout[name].title.text) layout[name].title.text = `${unitOfTime()[0]} since the start`;
    else if (last - first < 5) layout[name].dtick = 1;  // no ticks at half steps
    // Only labels of jumps that have room for them.
    const { domain, range } = layout[name], wide = (domain[1] - domain[0]) * (layout.width - layout.margin.l - layout.margin.r);
    let free = -Infinity;
    layout.annotations = layout.annotations.filter((each) => {
      if (each.jump !== name.replace("axis", "")) return true;
      const at = ((each.x - range[0]) / (range[1] - range[0])) * wide, fits = at >= free && at + LABEL <= wide;
      if (fits) free = at + LABEL;
      return fits;
    });
  }
  const shared = layout.yaxis2?.matches;
  for (const name of axisNames(layout, "y")) {
    const axis = layout[name], own = traces.filter((each) => shared || each.yaxis === name.replace("axis", ""));
    if (axis.type !== "log") continue;
    const sorted = (skipped) => own.flatMap((each) => (each.y.length > FEW_FIRST ? each.y.slice(skipped) : each.y)).sort((a, b) => a - b);
    const values = sorted(1), highest = sorted(0).at(-1);
    if (!values.length) continue;
    const lowest = Math.max(values[0], values[Math.floor(0.01 * values.length)] / 30);
    const low = Math.log10(Math.min(lowest, ...bounds)), high = Math.log10(Math.max(highest, ...bounds));
    const room = Math.max(0.05 * (high - low), 0.03);
    axis.range = [low - room, high + room];
    Object.assign(axis, logTicks(...axis.range));
  }
  axisNames(layout, "y").forEach((name, i) => {
    const key = name.replace("axis", "");
    if (!traces.some((each) => each.yaxis === key && each.x.length) && !layout.annotations.some((each) => each.said === i)) say(layout, i, BLANK);
    // Plotly leaves out a panel without a line.
    if (!traces.some((each) => each.yaxis === key))
      traces.push({ type: "scatter", mode: "lines", x: [first, last], y: [null, null], xaxis: key.replace("y", "x"), yaxis: key, hoverinfo: "skip" });
  });
}

// A zoomed axis chooses its own ticks.
function freeTicks(place) {
  if (place.freed) return;
  place.freed = true;
  place.on("plotly_relayout", (change) => {
    const names = Object.keys(change).filter((key) => /^[xy]axis\d*\.range\[0\]$/.test(key)).map((key) => key.split(".")[0]);
    const free = Object.fromEntries(names.filter((name) => place.layout[name].tickmode === "array" && place.layout[name].type === "log").map((name) => [`${name}.tickmode`, "auto"]));
    if (Object.keys(free).length) Plotly.relayout(place, free);
  });
}

// Reserves the height of a figure; it is drawn when it is in sight.
function show(figure, traces, layout, { overTime = true, bounds = [] } = {}) {
  const place = figure.querySelector(".plot");
  if (overTime && !traces.some(({ x }) => x.length) && !layout.annotations.some(({ said }) => said !== undefined))
    return empty(figure, "No finite number in the runs and the layer chosen.");
  place.style.minHeight = `${layout.height}px`;
  figure.stale = !figure.seen || !window.Plotly;
  if (figure.stale) return;
  if (overTime) { fit(traces, layout, bounds); hover(traces, layout); }
  const config = { ...CONFIG, toImageButtonOptions: { ...CONFIG.toImageButtonOptions, filename: figure.id } };
  Plotly.react(place, traces, layout, config);
  figure.dataset.drawn = "yes";
  freeTicks(place);
}

function empty(figure, why) {
  const place = figure.querySelector(".plot");
  window.Plotly?.purge(place);
  place.style.minHeight = "0";
  figure.dataset.drawn = "yes";
  figure.querySelector(".legend").replaceChildren();
  figure.querySelector(".note").textContent = why;
}

// Keys under a figure. Layers can be clicked.
function legend(figure, keys) {
  const place = figure.querySelector(".legend");
  place.replaceChildren(...keys.map(({ text, colour, kind = "", layer, ramp }) => {
    const key = document.createElement(layer ? "button" : "span"), mark = document.createElement("i");
    key.className = "key";
    mark.className = kind;
    mark.style.setProperty("--key", colour);
    if (ramp) { mark.className = "ramp"; mark.style.background = `linear-gradient(90deg, ${ramp.join(",")})`; }
    key.append(mark, text);
    if (layer) { key.type = "button"; key.addEventListener("click", () => chooseLayer(layer)); }
    return key;
  }));
}

function layerKeys() {
  if (isNamed()) return families().map((name) => ({ text: name, colour: colourOf(name), kind: dashOf(name), layer: data.groups.includes(name) && name }));
  const ramp = Array.from({ length: 9 }, (_, i) => depth(i / 8));
  const alike = data.runs.every(({ groups }) => groups.join() === data.groups.join()), all = visible(data.groups);
  const ends = alike ? `${all[0]} … ${all.at(-1)}` : "first … last layer of each run";
  return [{ text: `${ends}: hover a line for its layer, click to see it alone`, ramp, colour: "" }];
}

function runKeys(runs) {
  return runs.map((run) => ({ text: data.runs[run].name, colour: runColour(run), kind: runDash(run) }));
}

function note(figure, text) {
  figure.querySelector(".note").innerHTML = plain(text);
}

// A word in the middle of a panel that has no line.
const BLANK = "no finite number";
function say(layout, panel, text) {
  const { xaxis, yaxis } = axes(panel);
  layout.annotations.push({ said: panel, xref: `${xaxis} domain`, yref: `${yaxis} domain`, x: 0.5, y: 0.5, showarrow: false, text, font: { color: css("--soft"), size: 13 } });
}
