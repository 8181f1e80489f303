// Figures over time.
const LINEAR = new Set(["collapsed", "radial"]);

// The lines to draw; lines of zeros, which a log scale cannot show, and lines without a finite number apart.
function gather(quantity, statistic, log) {
  const found = [], zero = [], ended = [], blank = [];
  for (const run of shownRuns())
    for (const each of linesOf(run, (group) => lineOf(run, quantity, group, statistic), statistic)) {
      if (!each.values.some(Number.isFinite)) blank.push(each);
      else if (log && !each.values.some((value) => value > 0)) zero.push(each);
      else found.push(each);
      if (log && found.includes(each) && each.values.filter(Number.isFinite).at(-1) === 0) ended.push(each);
    }
  return { found, note: [told(zero, "Zero throughout, so not on this logarithmic scale"), told(ended, "Zero at the end, so not on this logarithmic scale there"), told(blank, "Not a finite number in any step")].filter(Boolean).join(" ") };
}

function told(lines, what) {
  const by = new Map();
  for (const { run, name } of lines) by.set(run, [...(by.get(run) ?? []), name]);
  const all = (run) => (state.layer ? 1 : data.grid ? families().length : shownGroups(run).length);
  const said = [...by].map(([run, names]) => data.runs[run].name + (names.length === all(run) ? "" : ` (${names.join(", ")})`));
  return said.length ? `${what}: ${said.join("; ")}.` : "";
}

function scaleOf(quantity, wanted, statistic) {
  if (wanted) return wanted === "log";
  if (LINEAR.has(quantity) && statistic !== "max-abs") return false;
  return !shownRuns().some((run) => shownGroups(run).some((group) => line(run, quantity, group, "min")?.some((value) => value < 0)));
}

// One layer: all runs in one panel, in their colours. All layers: a panel per run, layers coloured by depth.
function drawLines(figure, { quantity, statistic = "band", scale = "", bound } = {}) {
  const place = figure.querySelector(".plot");
  const log = scaleOf(quantity, scale, statistic), { found, note: unseen } = gather(quantity, statistic, log);
  const runs = [...new Set(found.map(({ run }) => run))];
  if (!found.length) return empty(figure, unseen || "Nothing to draw for the runs and the layer chosen.");
  const overlay = isOverlay();
  const few = overlay || visible(data.groups).length <= 4;
  const panels = overlay ? [{ title: "" }] : runs.map((run) => ({ title: data.runs[run].name, colour: runColour(run) }));
  const layout = frame(place, panels, { log, ytitle: axisTitle(quantity), height: overlay ? 320 : 250 });
  const traces = [], rate = quantity === "effective_lr", drawn = new Set();
  for (const { run, name: own, layer = "", values } of found) {
    const panel = overlay ? 0 : runs.indexOf(run);
    const colour = overlay ? runColour(run) : colourOf(own, run);
    if (statistic === "band" && few) {
      const low = line(run, quantity, layer, "q10"), high = line(run, quantity, layer, "q90");
      if (low && high) traces.push(...band(run, low, high, { panel, colour, log, alpha: veil(overlay ? runs.length : 1) }));
    }
    const name = overlay ? data.runs[run].name : own;
    traces.push(curve(run, values, { panel, colour, log, name, extra: overlay ? own : data.runs[run].name, width: few ? 2 : 1.4, dash: overlay ? runDash(run) : dashOf(own), raw: Boolean(bound) }));
    for (const group of rate ? (layer ? [layer] : shownGroups(run)) : []) {
      const nominal = line(run, "lr", group, "mean"), known = nominal && `${panel} ${overlay ? run : ""} ${nominal}`;
      if (!nominal || drawn.has(known)) continue;
      drawn.add(known);
      // Constant between jumps, or a smooth schedule.
      const steady = new Set(nominal).size <= data.runs[run].drops.length + 1;
      traces.push(curve(run, nominal, { panel, colour: overlay ? colour : css("--ink"), log, name: "nominal rate", extra: data.runs[run].name, dash: "dash", width: 1, shape: steady ? "hv" : "linear", raw: true }));
    }
  }
  const label = rate || quantity === "lr";
  for (const run of runs)
    markDrops(layout, run, overlay ? 0 : runs.indexOf(run), { colour: overlay ? runColour(run) : css("--soft"), label: label && (!overlay || run === runs[0]) });
  if (bound) panels.forEach((_, i) => markBound(layout, i, bound.value, i ? "" : bound.name, log));
  const keys = overlay ? runKeys(runs) : layerKeys();
  if (statistic === "band" && few) keys.push({ text: "10th to 90th percentile of rows", colour: css("--soft"), kind: "band" });
  if (drawn.size) keys.push({ text: "nominal rate", colour: overlay ? css("--soft") : css("--ink"), kind: "dash" });
  if (quantity === "collapsed") axisNames(layout, "y").forEach((name) => Object.assign(layout[name], { tickformat: ".0%", rangemode: "tozero" }));
  legend(figure, keys);
  note(figure, unseen);
  show(figure, traces, layout, { bounds: bound ? [bound.value] : [] });
}

const drawings = {
  lines: (figure, chosen) => drawLines(figure, { quantity: figure.dataset.needs, ...chosen }),
  share(figure) {
    const quantity = figure.dataset.needs, runs = shownRuns().filter((run) => hasQuantity(run, quantity));
    const some = runs.some((run) => shownGroups(run).some((group) => line(run, quantity, group, "mean")?.some((value) => value > 0)));
    if (runs.length && !some) return empty(figure, state.layer ? "No row of this layer collapsed." : "No row collapsed.");
    return drawLines(figure, { quantity, statistic: "mean", scale: "linear" });
  },
  bound: (figure) =>
    drawLines(figure, { quantity: figure.dataset.needs, statistic: "max-abs", scale: "log",
                        bound: { value: Number(figure.dataset.bound), name: figure.dataset.boundName } }),

  equilibrium(figure) {
    const [measured, predicted] = figure.dataset.needs.split(" ");
    const place = figure.querySelector(".plot"), overlay = isOverlay();
    const all = shownRuns().filter((run) => hasQuantity(run, measured));
    const runs = overlay ? all : all.filter((run) => hasQuantity(run, predicted));
    if (!runs.length)
      return all.length ? drawLines(figure, { quantity: measured }) : empty(figure, "Nothing to draw for the runs chosen.");
    const panels = overlay ? [{ title: "" }] : runs.map((run) => ({ title: data.runs[run].name, colour: runColour(run) }));
    const ytitle = overlay ? axisTitle(measured) : "measured / predicted";
    const layout = frame(place, panels, { log: true, ytitle, height: overlay ? 320 : 250 }), traces = [];
    runs.forEach((run, i) => {
      const ratio = (group) => {
        const ideal = lineOf(run, predicted, group, "band");
        return ideal && line(run, measured, group, "median")?.map((value, k) => value / ideal[k]);
      };
      if (!overlay)
        for (const { name, values } of linesOf(run, ratio, "median"))
          traces.push(curve(run, values, { panel: i, colour: colourOf(name, run), log: true, name, extra: data.runs[run].name, width: 1.5, dash: dashOf(name) }));
      for (const group of overlay ? shownGroups(run) : []) {
        const values = line(run, measured, group, "median"), ideal = lineOf(run, predicted, group, "band");
        if (!values) continue;
        const colour = runColour(run), low = line(run, measured, group, "q10"), high = line(run, measured, group, "q90");
        if (low && high) traces.push(...band(run, low, high, { colour, log: true, alpha: veil(runs.length) }));
        traces.push(curve(run, values, { colour, log: true, name: data.runs[run].name, extra: "measured", width: 2, dash: runDash(run) }));
        if (ideal) traces.push({ ...curve(run, ideal, { colour, log: true, name: data.runs[run].name, extra: "predicted", dash: "dash", width: 1.6 }), predicted: true });
      }
      markDrops(layout, run, overlay ? 0 : i, { colour: overlay ? runColour(run) : css("--soft") });
      if (!overlay) layout.shapes.push({ type: "line", xref: `${axes(i).xaxis} domain`, yref: axes(i).yaxis, x0: 0, x1: 1, y0: 1, y1: 1,
                                         line: { color: css("--ink"), width: 1.5, dash: "dash" }, layer: "below" });
    });
    const soft = css("--soft"), drawn = runs.filter((run) => shownGroups(run).some((group) => line(run, measured, group, "median")));
    const foreseen = traces.some(({ predicted: is }) => is) ? [{ text: "predicted equilibrium", colour: soft, kind: "dash" }] : [];
    legend(figure, overlay
      ? [...runKeys(drawn), ...foreseen, { text: "10th to 90th percentile of rows", colour: soft, kind: "band" }]
      : [...layerKeys(), { text: "equilibrium", colour: css("--ink"), kind: "dash" }]);
    note(figure, "");
    show(figure, traces, layout, { bounds: overlay ? [] : [1] });
  },

  phenomena(figure) {
    const place = figure.querySelector(".plot"), overlay = isOverlay();
    const names = figure.dataset.needs.split(" ").filter((name) => shownRuns().some((run) => hasQuantity(run, name)));
    const runs = shownRuns().filter((run) => names.some((name) => hasQuantity(run, name)));
    if (!runs.length) return empty(figure, "Nothing to draw for the runs chosen.");
    const narrow = place.clientWidth < 560, cells = [];
    for (const name of names) for (const run of overlay ? [null] : runs) cells.push({ name, run });
    const columns = narrow ? 1 : overlay || runs.length === 1 ? 2 : Math.min(runs.length, columnsFor(place, runs.length, 220));
    // If every run has a column, its name is above the column and the phenomenon beside the row.
    const columned = !overlay && columns === runs.length && columns > 1;
    const panels = cells.map(({ name, run }, i) => {
      if (run === null) return { title: titleOf(name) };
      if (columned) return { title: i < columns ? data.runs[run].name : "", colour: runColour(run), ytitle: `${titleOf(name).replace(") ", ")<br>")}` };
      return { title: runs.length > 1 ? `${titleOf(name).split(" ")[0]} ${data.runs[run].name}` : titleOf(name), colour: runs.length > 1 ? runColour(run) : undefined };
    });
    const layout = frame(place, panels, { log: true, columns, height: overlay ? 200 : 150, ytitle: "radians" }), traces = [], zero = [];
    if (columned) layout.margin.l += 14;  // for a title of two lines
    cells.forEach(({ name, run }, i) => {
      for (const own of run === null ? runs : [run])
        for (const { name: group, layer, values } of linesOf(own, (group) => line(own, name, group, "median"), "median")) {
          if (!values.some((value) => value > 0)) { if (values.some(Number.isFinite)) zero.push({ name, run: own }); continue; }
          const colour = overlay ? runColour(own) : colourOf(group, own);
          const low = line(own, name, layer, "q10"), high = line(own, name, layer, "q90");
          if (overlay && low && high) traces.push(...band(own, low, high, { panel: i, colour, log: true, alpha: veil(runs.length) }));
          traces.push(curve(own, values, { panel: i, colour, log: true, width: overlay ? 1.8 : 1.3, dash: overlay ? runDash(own) : dashOf(group), name: overlay ? data.runs[own].name : group, extra: titleOf(name) }));
        }
      if (!traces.some((each) => each.xaxis === axes(i).xaxis))
        say(layout, i, zero.some((each) => each.name === name && (run === null || each.run === run)) ? "0 throughout" : (run === null ? runs : [run]).some((own) => shownGroups(own).some((group) => line(own, name, group, "median"))) ? BLANK : "not recorded");
    });
    const gone = new Map();
    for (const { name, run } of zero) gone.set(run, (gone.get(run) ?? new Set()).add(titleOf(name).split(" ")[0]));
    note(figure, overlay && gone.size ? `Zero throughout: ${[...gone].map(([run, of]) => `${data.runs[run].name} ${[...of].join(", ")}`).join("; ")}.` : "");
    const drawn = runs.filter((run) => shownGroups(run).some((group) => names.some((name) => line(run, name, group, "median"))));
    legend(figure, overlay ? [...runKeys(drawn), { text: "10th to 90th percentile of rows", colour: css("--soft"), kind: "band" }] : layerKeys());
    show(figure, traces, layout);
  },

  // A panel per run, with a line for each pair, which is not a layer.
  pairs(figure) {
    const runs = shownRuns().filter((run) => hasQuantity(run, "imbalance"));
    if (!runs.length) return empty(figure, "Nothing to draw for the runs chosen.");
    const panels = runs.map((run) => ({ title: data.runs[run].name, colour: runColour(run) }));
    const layout = frame(figure.querySelector(".plot"), panels, { log: true, ytitle: "‖a‖/‖b‖" }), traces = [];
    const names = distinct(runs.flatMap((run) => Object.keys(data.runs[run].series.imbalance))).filter(Boolean);
    const shade = (name) => depth(names.length > 1 ? names.indexOf(name) / (names.length - 1) : 0.4);
    runs.forEach((run, panel) => {
      for (const name of names) {
        const values = line(run, "imbalance", name, "median");
        if (values) traces.push(curve(run, values, { panel, colour: shade(name), log: true, name, extra: data.runs[run].name }));
      }
      markDrops(layout, run, panel, { colour: css("--soft") });
    });
    const ramp = Array.from({ length: 9 }, (_, i) => depth(i / 8));
    legend(figure, names.length <= 8 ? names.map((text) => ({ text, colour: shade(text) })) : [{ text: `${names[0]} … ${names.at(-1)}`, ramp, colour: "" }]);
    show(figure, traces, layout);
  },

  whole(figure) {
    const place = figure.querySelector(".plot"), runs = shownRuns();
    const names = data.whole.filter((name) => runs.some((run) => line(run, name, "", "mean")));
    if (!names.length) return empty(figure, "Nothing to draw for the runs chosen.");
    const panels = names.map((name) => ({ title: name[0].toUpperCase() + titleOf(name).slice(1) }));
    const layout = frame(place, panels, { together: false, height: 260, columns: columnsFor(place, names.length, 380) }), traces = [];
    names.forEach((name, i) => {
      const lines = runs.map((run) => line(run, name, "", "mean"));
      const known = lines.filter(Boolean).flatMap((values) => [...values]).filter(Number.isFinite);
      const low = Math.min(...known), high = Math.max(...known), log = low > 0 && high / low > 20;
      layout[`yaxis${i ? i + 1 : ""}`].type = log ? "log" : "linear";
      runs.forEach((run, k) => {
        if (!lines[k]) return;
        const colour = runColour(run);
        const under = line(run, name, "", "min"), over = line(run, name, "", "max");
        if (under && over) traces.push(...band(run, under, over, { panel: i, colour, log }));
        traces.push(curve(run, lines[k], { panel: i, colour, log, name: data.runs[run].name, extra: titleOf(name), dash: runDash(run) }));
        markDrops(layout, run, i, { colour });
      });
    });
    legend(figure, runKeys(runs));
    show(figure, traces, layout);
  },
};
