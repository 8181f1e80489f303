// Selectors, and figures that are drawn when they become visible.
const STATISTICS = [["band", "median, 10–90 %"], ["mean", "mean"], ["min", "minimum"], ["q10", "10th percentile"], ["q90", "90th percentile"], ["max", "maximum"]];
const figures = every("figure[data-kind]");

function fill(select, options, wanted) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  if (wanted !== undefined && options.some(([value]) => value === wanted)) select.value = wanted;
}

const control = (figure, name) => figure.querySelector(`[data-control="${name}"]`);
const distinct = (list) => [...new Set(list)];

// Steps that a slider stands for: [every step there is].
const stepsOf = {
  "row-step": (figure) => {
    const found = histogramOf(control(figure, "row-quantity").value, control(figure, "row-group").value);
    return distinct((found?.counts ?? []).flatMap(({ steps }) => steps)).sort((a, b) => a - b);
  },
  "block-step": () => distinct(data.runs.flatMap(({ steps }) => steps)).sort((a, b) => a - b),
  "sphere-step": (figure) => distinct(data.spheres[Number(control(figure, "sphere-row").value)].paths.flatMap(({ steps }) => steps)).sort((a, b) => a - b),
};

function setSlider(figure, name, keep) {
  const slider = control(figure, name), steps = stepsOf[name](figure);
  const was = slider.steps?.[Number(slider.value)];
  slider.steps = steps;
  slider.max = String(Math.max(steps.length - 1, 0));
  slider.value = String(keep && was !== undefined ? nearest(steps, was) : steps.length - 1);
  slider.nextElementSibling.value = String(steps[Number(slider.value)] ?? "");
}

const rowsOf = (quantity) => distinct(data.histograms.filter((each) => each.quantity === quantity).map((each) => each.group)).sort((a, b) => data.groups.indexOf(a) - data.groups.indexOf(b));

const setUp = {
  quantity(select, figure) {
    const names = Object.keys(data.quantities);
    fill(select, names.map((name) => [name, titleOf(name)]), figure.id === "any" ? "radius" : "angle");
    if (!select.value) [select.value] = names;
  },
  statistic: (select, figure) => fill(select, ["heat", "blocks"].includes(figure.dataset.kind) ? [["median", "median"], ...STATISTICS.slice(1)] : STATISTICS, figure.id === "defect" ? "max" : undefined),
  scale: (select) => fill(select, [["", "as fits"], ["log", "logarithmic"], ["linear", "linear"]]),
  "row-quantity": (select) => fill(select, distinct(data.histograms.map((each) => each.quantity)).map((name) => [name, titleOf(name)]), "effective_lr"),
  "row-group": (select, figure) => fill(select, rowsOf(control(figure, "row-quantity").value).map((name) => [name, name]), state.layer || select.value),
  "row-step": (_, figure) => setSlider(figure, "row-step"),
  "sphere-row": (select) => fill(select, data.spheres.map(({ group, row, paths }, i) => [String(i), `${group}, row ${row}${data.runs.length > 1 ? ` (${paths.length} of ${data.runs.length} runs)` : ""}`])),
  "sphere-step": (_, figure) => setSlider(figure, "sphere-step"),
  "block-step": (_, figure) => setSlider(figure, "block-step"),
  reference: (select) => fill(select, distinct(data.cosines.flatMap(({ runs }) => runs)).sort((a, b) => a - b).map((run) => [String(run), data.runs[run].name])),
};

// Redraw what depends on a selector that changed.
function follow(figure, name) {
  if (name === "row-quantity") setUp["row-group"](control(figure, "row-group"), figure);
  if (name === "row-quantity" || name === "row-group") setSlider(figure, "row-step", true);
  if (name === "sphere-row") setSlider(figure, "sphere-step");
}

function chosen(figure) {
  return Object.fromEntries(every("[data-control]", figure).map((each) => [each.dataset.control, each.steps ? each.steps[Number(each.value)] : each.value]));
}

// Draws a figure in sight; of others, all but the plot, so that links find their headings where they will be.
function redraw(figure) {
  const place = figure.querySelector(".plot");
  if (!place.clientWidth) return;  // in a folded part
  drawings[figure.dataset.kind](figure, chosen(figure));
  if (place.on && !place.linked) {
    place.linked = true;
    place.on("plotly_click", ({ points, event }) => {
      const away = ({ y, yaxis }) => Math.abs(yaxis.d2p(y) + yaxis._offset - (event.clientY - place.getBoundingClientRect().top));
      const [point] = points.toSorted((one, two) => away(one) - away(two));
      const layer = { heat: point.y, blocks: point.text }[figure.dataset.kind] ?? point.data.meta;
      if (!state.layer && data.groups.includes(layer)) chooseLayer(layer);
    });
  }
}

const axis = document.getElementById("axis");
axis.addEventListener("change", () => { state.time = axis.value === "time"; redrawSeen(); });
const redrawAll = () => { axis.parentElement.hidden = !haveTimes(); figures.forEach(redraw); };
// For changes that leave every height as it is.
const redrawSeen = () => figures.forEach((figure) => { if (figure.seen) redraw(figure); else figure.stale = true; });

function chooseLayer(layer) {
  state.vectors = layer === "*";
  state.layer = state.vectors ? "" : layer;
  document.getElementById("layer").value = layer;
  for (const figure of figures) {
    const rows = control(figure, "row-group");
    if (rows && [...rows.options].some(({ value }) => value === layer)) { rows.value = layer; follow(figure, "row-group"); }
    const row = control(figure, "sphere-row"), at = data.spheres.findIndex(({ group }) => group === layer);
    if (row && at >= 0) { row.value = String(at); follow(figure, "sphere-row"); }
  }
  redrawAll();
}

for (const figure of figures)
  for (const each of every("[data-control]", figure)) {
    const name = each.dataset.control;
    setUp[name](each, figure);
    each.addEventListener(each.type === "range" ? "input" : "change", () => {
      if (each.steps) each.nextElementSibling.value = String(each.steps[Number(each.value)]);
      follow(figure, name);
      redraw(figure);
    });
  }

const layerSelect = document.getElementById("layer");
fill(layerSelect, [["", "all layers"], ...(data.vectors.length ? [["*", "all, with biases and gains"]] : []), ...data.groups.map((group) => [group, group])], "");
layerSelect.addEventListener("change", () => chooseLayer(layerSelect.value));

const toggles = document.querySelector(".run-toggles");
data.runs.forEach((run, i) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = run.name;
  button.style.setProperty("--run", `var(--run-${i % 7})`);
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    state.runs[i] = !state.runs[i];
    if (!state.runs.some(Boolean)) state.runs[i] = true;
    button.setAttribute("aria-pressed", String(state.runs[i]));
    redrawAll();
  });
  toggles.append(button);
});

// Whatever is fixed beside or below the bar starts at its end, however many runs it lists.
const bar = document.querySelector(".bar");
new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawSeen);
document.getElementById("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("steradian-theme", theme); } catch { /* a file: page may have no storage */ }
  redrawSeen();
});

const smoothing = document.getElementById("smoothing");
smoothing.addEventListener("input", () => { state.smoothing = Number(smoothing.value); redrawSeen(); });

const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.seen = isIntersecting;
    if (isIntersecting && target.stale) redraw(target);
  }
}, { rootMargin: "400px 0px" });

let width = window.innerWidth, waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; redrawAll(); } }, 150);
});

// For printing, every figure is drawn, as wide as the paper and dark on light.
let shade;
window.addEventListener("beforeprint", () => {
  shade = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.documentElement.classList.add("on-paper");
  every("details.fold").forEach((each) => { each.open = true; });
  figures.forEach((figure) => { figure.seen = true; });
  redrawAll();
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("on-paper");
  document.documentElement.dataset.theme = shade;
  redrawAll();
});

if (window.innerWidth <= 1000) document.querySelector(".contents").open = false;
const links = new Map(every("nav a").map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries)
    if (isIntersecting) {
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(target.id)?.setAttribute("aria-current", "true");
    }
}, { rootMargin: "-20% 0px -70% 0px" });
every("main > section").forEach((section) => reading.observe(section));

// A link opens what is folded, and selects the layer and the quantity that it is about.
function reveal(target) {
  const folded = target?.closest("details.fold");
  if (folded && !folded.open) { folded.open = true; redrawAll(); }
}
every("details.fold").forEach((each) => each.addEventListener("toggle", () => { if (each.open) redrawAll(); }));
document.addEventListener("click", (event) => {
  const link = event.target.closest('main a[href^="#"]'), target = link && document.querySelector(link.hash);
  if (!target) return;
  reveal(target);
  const { layer, quantity } = link.dataset, select = control(target, "quantity");
  if (select && quantity) select.value = quantity;
  if (layer !== undefined) chooseLayer(data.groups.includes(layer) ? layer : "");
});

// A served page loads again when its runs have changed and it is not in use; what was chosen stays.
const { live } = document.documentElement.dataset;
if (live) {
  const mark = document.querySelector(".live"), kept = JSON.parse(sessionStorage.getItem("steradian-live") ?? "null");
  let used = 0;
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) addEventListener(kind, () => { used = performance.now(); });
  mark.textContent = `live, step ${Math.max(...data.runs.map(({ last }) => last))}`;
  setInterval(async () => {
    const now = await fetch("state").then((answer) => answer.text()).catch(() => "");
    mark.classList.toggle("gone", !now);
    if (!now || now === live || document.hidden || performance.now() - used < 2000) return;
    sessionStorage.setItem("steradian-live", JSON.stringify({ ...state, layer: layerSelect.value, y: scrollY }));
    location.reload();
  }, 2000);
  if (kept) {
    history.scrollRestoration = "manual";
    state.runs = data.runs.map((_, i) => kept.runs[i] ?? true);
    every("button", toggles).forEach((button, i) => button.setAttribute("aria-pressed", String(state.runs[i])));
    smoothing.value = state.smoothing = kept.smoothing;
    state.time = kept.time;
    axis.value = kept.time ? "time" : "";
    chooseLayer(["*", ...data.groups].includes(kept.layer) ? kept.layer : "");
    scrollTo(0, kept.y);
  }
}

redrawAll();
const wanted = location.hash && document.querySelector(location.hash);
if (wanted && !live) { reveal(wanted); wanted.scrollIntoView(); }
figures.forEach((figure) => sight.observe(figure));
const code = document.createElement("script");
code.textContent = new TextDecoder().decode(await plotly);
document.head.append(code);
redrawSeen();
