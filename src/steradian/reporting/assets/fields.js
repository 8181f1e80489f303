// Layer × time, histograms over rows, cosines between runs.
drawings.heat = (figure, { quantity, statistic }) => {
  const place = figure.querySelector(".plot"), runs = shownRuns().filter((run) => hasQuantity(run, quantity));
  if (!runs.length) return empty(figure, "Nothing to draw for the runs chosen.");
  const fields = runs.map((run) => {
    const groups = data.runs[run].groups.filter((group) => lineOf(run, quantity, group, statistic));
    const lines = groups.map((group) => lineOf(run, quantity, group, statistic)), { steps } = data.runs[run];
    // Logged quantities have steps at which layers, observed more rarely, were not recorded.
    const known = steps.map((_, k) => k).filter((k) => lines.some((row) => Number.isFinite(row[k])));
    return { run, groups, steps: known.map((k) => steps[k]), values: lines.map((row) => known.map((k) => row[k])) };
  });
  let low = Infinity, high = -Infinity, least = Infinity;
  for (const { values } of fields) for (const row of values) for (const value of row)
    if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); if (value > 0) least = Math.min(least, value); }
  if (low > high) return empty(figure, `${titleOf(quantity)}: ${BLANK} in the runs chosen.`);
  const log = low >= 0 && high > 0, deepest = log ? Math.max(Math.log10(least), Math.log10(high) - 8) : low;
  const tall = Math.max(...fields.map(({ groups }) => groups.length));
  const panels = runs.map((run) => ({ title: data.runs[run].name, colour: runColour(run) }));
  const narrow = place.clientWidth < 560, most = narrow ? 14 : 32;
  const height = Math.min(Math.max(90, 17 * tall), 520);
  const layout = frame(place, panels, { columns: 1, together: false, height });
  layout.margin.l = 14 + 7 * Math.max(...data.groups.map((group) => label(group, most).length));
  layout.margin.r = narrow ? 60 : 78;
  const top = log ? Math.log10(high) : high, ticks = log ? decades(deepest, top) : undefined;
  const traces = fields.map(({ run, groups, steps, values }, i) => {
    const n = i ? i + 1 : "", every = Math.ceil((16 * groups.length) / height);
    if (steps.length < 5 && steps.at(-1) - steps[0] < 5) layout[`xaxis${n}`].dtick = 1;  // no ticks at half steps
    // As many names as there is room for.
    const named = groups.filter((_, k) => k % every === 0);
    if (!values.some((row) => row.some((value) => (log ? value > 0 : Number.isFinite(value))))) {
      const zero = values.some((row) => row.some(Number.isFinite));
      Object.assign(layout[`yaxis${n}`], { showticklabels: false });
      Object.assign(layout[`xaxis${n}`], { showticklabels: false });
      say(layout, i, zero ? "0 throughout" : BLANK);
    }
    Object.assign(layout[`yaxis${n}`], { type: "category", autorange: "reversed", tickvals: named, ticktext: named.map((group) => label(group, most)),
                                         tickangle: 0, tickfont: { size: 11.5 }, nticks: 0, title: { text: "" }, showgrid: false });
    return {
      type: "heatmap", x: steps, y: groups, ...axes(i), colorscale: VIRIDIS.map((colour, k) => [k / (VIRIDIS.length - 1), colour]),
      z: values.map((row) => row.map((value) => (log ? (value > 0 ? Math.log10(value) : null) : value))),
      customdata: values, zmin: deepest, zmax: top === deepest ? top + 1 : top, showscale: i === 0,
      colorbar: { title: { text: plain(symbolOf(quantity) || titleOf(quantity)), side: "top", font: { size: 12.5 } }, thickness: 12, outlinewidth: 0, x: 1.01, xpad: 4,
                  lenmode: "pixels", len: Math.min(300, layout.height - 60), y: 1, yanchor: "top", tickfont: { size: 11.5 },
                  ...(ticks ? { tickvals: ticks, ticktext: ticks.map((tick) => short(10 ** tick)) } : {}) },
      hovertemplate: `<b>%{y}</b><br>step %{x}: %{customdata:.3~g}<extra>${escapeHtml(data.runs[run].name)}</extra>`,
      hoverongaps: false,
    };
  });
  note(figure, data.quantities[quantity]?.meaning ? `${titleOf(quantity)}: ${data.quantities[quantity].meaning}.` : "");
  show(figure, traces, layout, { overTime: false });
};

function decades(low, high) {
  const fine = high - low < 2 ? [0, Math.log10(2), Math.log10(5)] : [0], found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1)
    for (const part of fine) if (power + part >= low - 1e-9 && power + part <= high + 1e-9) found.push(power + part);
  return found.length > 1 ? found : [low, high];
}

function nearest(steps, step) {
  return steps.reduce((best, other, i) => (Math.abs(other - step) < Math.abs(steps[best] - step) ? i : best), 0);
}

const histogramOf = (quantity, group) => data.histograms.find((each) => each.quantity === quantity && each.group === group);

drawings.histogram = (figure, { "row-quantity": quantity, "row-group": group, "row-step": step }) => {
  const place = figure.querySelector(".plot"), found = histogramOf(quantity, group);
  const shown = found?.counts.filter(({ run }) => state.runs[run]) ?? [];
  if (!shown.length) return empty(figure, "Single rows of this quantity and layer are not recorded in the runs chosen.");
  const edges = numbers(found.edges, data.bins + 1), layout = frame(place, [{ title: "" }], { height: 300, xtitle: axisTitle(quantity), ytitle: "share of rows" });
  let highest = 0;
  const traces = [], keys = [];
  for (const { run, steps, at } of shown) {
    const counts = numbers(at, steps.length * data.bins), i = nearest(steps, step);
    const share = (k) => { const own = counts.subarray(k * data.bins, (k + 1) * data.bins), sum = own.reduce((a, b) => a + b, 0); return Array.from(own, (n) => n / Math.max(sum, 1)); };
    const y = share(i), colour = runColour(run);
    highest = Math.max(highest, ...y);
    const x = [edges[0], ...edges], outline = [0, ...y, 0];
    traces.push({ type: "scatter", mode: "lines", x, y: outline, line: { shape: "hv", color: colour, width: 1.8, dash: runDash(run) }, fill: "tozeroy",
                  fillcolor: faded(colour, 0.2), name: data.runs[run].name, meta: steps[i], ...axes(0),
                  hovertemplate: `from %{x:.3~g}: %{y:.1%} of rows<extra>${escapeHtml(data.runs[run].name)}, step ${steps[i]}</extra>` });
    keys.push({ text: `${data.runs[run].name}, step ${steps[i]}`, colour, kind: runDash(run) });
  }
  Object.assign(layout.xaxis, { type: found.log ? "log" : "linear", exponentformat: "power", showgrid: true, range: found.log ? [Math.log10(edges[0]), Math.log10(edges.at(-1))] : [edges[0], edges.at(-1)] });
  if (found.log) Object.assign(layout.xaxis, logTicks(...layout.xaxis.range, place.clientWidth < 560 ? 4 : 9), { tickangle: 0 });
  Object.assign(layout.yaxis, { tickformat: ".0%", range: [0, highest * 1.06] });
  legend(figure, keys);
  note(figure, "");
  show(figure, traces, layout, { overTime: false });
};

drawings.cosine = (figure, { reference }) => {
  const place = figure.querySelector(".plot"), base = Number(reference), traces = [], seen = new Set();
  const layout = frame(place, [{ title: "" }], { height: 320, ytitle: "⟨u, u′⟩" });
  for (const { group, row, runs, steps, at } of data.cosines) {
    if (!runs.includes(base) || (state.layer && group !== state.layer)) continue;
    const other = runs[0] === base ? runs[1] : runs[0];
    if (!state.runs[other]) continue;
    seen.add(other);
    traces.push({ ...curve(steps, numbers(at, steps.length), { colour: runColour(other), width: 1.3, name: `${group}, row ${row}`, extra: data.runs[other].name, dash: runDash(other) }), opacity: 0.75 });
  }
  if (!traces.length) return empty(figure, "No other run has the same rows at the same steps, for the runs and the layer chosen.");
  const low = Math.min(0.98, ...traces.flatMap((each) => each.y));
  layout.yaxis.range = [low - 0.06 * (1 - low), 1 + 0.06 * (1 - low)];
  markDrops(layout, base, 0, { colour: css("--soft") });
  legend(figure, runKeys([...seen]));
  note(figure, `Compared with ${data.runs[base].name}.`);
  show(figure, traces, layout);
};
