// Block × role, layer × time, histograms over rows, cosines between runs.

// How the values of maps become colours, the same in all panels; null if no value is finite.
function shading(quantity, values, layout) {
  let low = Infinity, high = -Infinity, least = Infinity;
  for (const value of values)
    if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); if (value > 0) least = Math.min(least, value); }
  if (low > high) return null;
  const log = low >= 0 && high > 0, bottom = log ? Math.max(Math.log10(least), Math.log10(high) - 8) : low;
  const top = log ? Math.log10(high) : high, long = Math.min(300, layout.height - 60), found = log ? decades(bottom, top) : [];
  const every = Math.ceil((20 * found.length) / long), ticks = found.filter((_, k) => k % every === 0);
  const trace = {
    type: "heatmap", colorscale: VIRIDIS.map((colour, k) => [k / (VIRIDIS.length - 1), colour]), zmin: bottom, zmax: top === bottom ? top + 1 : top, hoverongaps: false,
    colorbar: { title: { text: plain(symbolOf(quantity) || titleOf(quantity)), side: "top", font: { size: 12.5 } }, thickness: 12, outlinewidth: 0, x: 1.01, xpad: 4,
                lenmode: "pixels", len: long, y: 1, yanchor: "top", tickfont: { size: 11.5 },
                ...(log ? { tickvals: ticks, ticktext: ticks.map((tick) => short(10 ** tick)) } : {}) },
  };
  const shown = (value) => (log ? value > 0 : Number.isFinite(value));
  return { trace, shown, shade: (value) => (!shown(value) ? null : log ? Math.log10(value) : value) };
}

const meaning = (quantity) => (data.quantities[quantity]?.meaning ? `${titleOf(quantity)}: ${data.quantities[quantity].meaning}.` : "");
const names = { type: "category", autorange: "reversed", tickangle: 0, tickfont: { size: 11.5 }, nticks: 0, title: { text: "" }, showgrid: false };
function mapFrame(place, runs, labels, height, options) {
  const layout = frame(place, runs.map((run) => ({ title: data.runs[run].name, colour: runColour(run) })), { columns: 1, together: false, height: isNarrow(place) && runs.length > 1 ? height / 0.7 : height, ...options });
  layout.margin.l = 14 + 7 * Math.max(...labels.map((text) => text.length));
  layout.margin.r = isNarrow(place) ? 60 : 78;
  return layout;
}

drawings.blocks = (figure, { quantity, statistic, "block-step": step }) => {
  const place = figure.querySelector(".plot"), runs = shownRuns().filter((run) => hasQuantity(run, quantity)), { blocks, places } = data.grid;
  const roles = families().filter((name) => data.grid.roles.includes(name));
  if (!runs.length) return empty(figure, "Nothing to draw for the runs chosen.");
  const most = isNarrow(place) ? 16 : 32, labels = roles.map((role) => shortened(role, most)), outside = [];
  const fields = runs.map((run) => {
    const values = roles.map(() => blocks.map(() => NaN)), groups = roles.map(() => blocks.map(() => "")), { steps } = data.runs[run];
    for (const group of visible(data.runs[run].groups)) {
      const own = lineOf(run, quantity, group, statistic);
      // The last finite number up to the step: not all layers are observed at all steps.
      let at = own ? nearest(steps, step) : -1;
      while (at > 0 && !Number.isFinite(own[at])) at -= 1;
      if (!own) continue;
      if (!places[group]) { outside.push(`${group} ${short(own[at])}`); continue; }
      const [b] = places[group], r = roles.indexOf(data.grid.roles[places[group][1]]);
      values[r][b] = own[at];
      groups[r][b] = group;
    }
    return { values, groups };
  });
  const layout = mapFrame(place, runs, labels, Math.max(90, 24 * roles.length), { xtitle: "block" });
  const shades = shading(quantity, fields.flatMap(({ values }) => values.flat()), layout);
  if (!shades) return empty(figure, `${titleOf(quantity)}: ${BLANK} in the runs chosen.`);
  const head = blocks[0].replace(/\d+$/, ""), alike = blocks.every((block) => block.replace(/\d+$/, "") === head);
  const ticks = blocks.map((block) => (alike ? block.slice(head.length) : block)), wide = place.clientWidth - layout.margin.l - layout.margin.r;
  const every = Math.ceil((blocks.length * (8 + 7 * Math.max(...ticks.map((text) => text.length)))) / wide);
  const traces = fields.map(({ values, groups }, i) => {
    const n = i ? i + 1 : "", kept = blocks.map((_, k) => k).filter((k) => k % every === 0);
    Object.assign(layout[`yaxis${n}`], { ...names, tickvals: roles, ticktext: labels });
    Object.assign(layout[`xaxis${n}`], { tickvals: kept, ticktext: kept.map((k) => ticks[k]), tickangle: 0 });
    return { ...shades.trace, ...axes(i), x: blocks.map((_, k) => k), y: roles, z: values.map((row) => row.map(shades.shade)), customdata: values, text: groups, showscale: i === 0, xgap: 1, ygap: 1,
             hovertemplate: `<b>%{text}</b><br>%{customdata:.3~g}<extra>${escapeHtml(data.runs[runs[i]].name)}</extra>` };
  });
  note(figure, `${meaning(quantity)}${outside.length ? ` Outside the blocks: ${outside.join(", ")}.` : ""}`);
  show(figure, traces, layout, { overTime: false });
};

drawings.heat = (figure, { quantity, statistic }) => {
  const place = figure.querySelector(".plot"), runs = shownRuns().filter((run) => hasQuantity(run, quantity));
  if (!runs.length) return empty(figure, "Nothing to draw for the runs chosen.");
  const fields = runs.map((run) => {
    const groups = visible(data.runs[run].groups).filter((group) => lineOf(run, quantity, group, statistic));
    const lines = groups.map((group) => lineOf(run, quantity, group, statistic)), { steps } = data.runs[run];
    // Logged quantities have steps at which layers, observed more rarely, were not recorded.
    const known = steps.map((_, k) => k).filter((k) => lines.some((row) => Number.isFinite(row[k])));
    return { run, groups, steps: known.map((k) => steps[k]), values: lines.map((row) => known.map((k) => row[k])) };
  });
  const tall = Math.max(...fields.map(({ groups }) => groups.length)), most = isNarrow(place) ? 16 : 32;
  const height = Math.min(Math.max(90, 17 * tall), 520), layout = mapFrame(place, runs, visible(data.groups).map((group) => label(group, most)), height);
  const shades = shading(quantity, fields.flatMap(({ values }) => values.flat()), layout);
  if (!shades) return empty(figure, `${titleOf(quantity)}: ${BLANK} in the runs chosen.`);
  const traces = fields.map(({ run, groups, steps, values }, i) => {
    const n = i ? i + 1 : "", every = Math.ceil((16 * groups.length) / height);
    if (steps.length < 5 && steps.at(-1) - steps[0] < 5) layout[`xaxis${n}`].dtick = 1;  // no ticks at half steps
    layout[`xaxis${n}`].range = [steps[0] - 0.5, steps.at(-1) + 0.5];  // cells reach to the middle between steps
    // As many names as there is room for.
    const kept = groups.filter((_, k) => k % every === 0);
    Object.assign(layout[`yaxis${n}`], { ...names, tickvals: kept, ticktext: kept.map((group) => label(group, most)) });
    if (!values.some((row) => row.some(shades.shown))) {
      layout[`xaxis${n}`].showticklabels = layout[`yaxis${n}`].showticklabels = false;
      say(layout, i, values.some((row) => row.some(Number.isFinite)) ? "0 throughout" : BLANK);
    }
    return { ...shades.trace, ...axes(i), x: steps, y: groups, z: values.map((row) => row.map(shades.shade)), customdata: values, showscale: i === 0,
             hovertemplate: `<b>%{y}</b><br>step %{x}: %{customdata:.3~g}<extra>${escapeHtml(data.runs[run].name)}</extra>` };
  });
  note(figure, meaning(quantity));
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
    traces.push({ ...curve(base, numbers(at, steps.length), { steps, colour: runColour(other), width: 1.3, name: `${group}, row ${row}`, extra: data.runs[other].name, dash: runDash(other) }), opacity: 0.75 });
  }
  if (!traces.length) return empty(figure, "No other run has the same rows at the same steps, for the runs and the layer chosen.");
  const low = Math.min(0.98, ...traces.flatMap((each) => each.y));
  layout.yaxis.range = [low - 0.06 * (1 - low), 1 + 0.06 * (1 - low)];
  markDrops(layout, base, 0, { colour: css("--soft") });
  legend(figure, runKeys([...seen]));
  note(figure, `Compared with ${data.runs[base].name}.`);
  show(figure, traces, layout);
};
