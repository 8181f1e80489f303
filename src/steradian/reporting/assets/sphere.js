// The sphere: an orthographic view that can be turned, drawn as SVG, so that it needs no WebGL and prints sharp.
const SVG = "http://www.w3.org/2000/svg";
const view = { turn: [[1, 0, 0], [0, 1, 0], [0, 0, 1]], zoom: 1, middle: [0, 0, 0], key: "" };
const CHUNK = 6;

const times = (m, v) => m.map((row) => row[0] * v[0] + row[1] * v[1] + row[2] * v[2]);
const product = (m, n) => m.map((row) => [0, 1, 2].map((j) => row[0] * n[0][j] + row[1] * n[1][j] + row[2] * n[2][j]));
const unit = (v) => { const length = Math.hypot(...v) || 1; return v.map((x) => x / length); };
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];

function rotated(ax, ay) {
  const [ca, sa, cb, sb] = [Math.cos(ax), Math.sin(ax), Math.cos(ay), Math.sin(ay)];
  view.turn = product(product([[1, 0, 0], [0, ca, -sa], [0, sa, ca]], [[cb, 0, sb], [0, 1, 0], [-sb, 0, cb]]), view.turn);
}

// Look at the middle of the path, its start to the left of its end.
function face(paths) {
  const middle = unit([0, 1, 2].map((k) => paths.reduce((sum, path) => sum + path.xyz.reduce((s, p) => s + p[k], 0) / path.xyz.length, 0)));
  const way = [0, 1, 2].map((k) => paths[0].xyz.at(-1)[k] - paths[0].xyz[0][k]);
  const across = way.map((value, k) => value - middle[k] * (way[0] * middle[0] + way[1] * middle[1] + way[2] * middle[2]));
  const x = Math.hypot(...across) > 1e-6 ? unit(across) : unit(cross(Math.abs(middle[0]) < 0.9 ? [1, 0, 0] : [0, 1, 0], middle));
  view.turn = [x, cross(middle, x), middle];
  rotated(0.42, -0.38);
  view.zoom = 1;
  view.middle = middle;
}

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

// The middle of the path stays where it is when the view is zoomed.
function project(v) {
  const [x, y, z] = times(view.turn, v), [mx, my] = times(view.turn, view.middle);
  return [300 + 258 * (mx + view.zoom * (x - mx)), 300 - 258 * (my + view.zoom * (y - my)), z];
}
const trace = (list) => `M${list.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;

// A circle of the graticule, its hidden half fainter.
function circle(parent, at) {
  for (const front of [false, true]) {
    let d = "", pen = false;
    for (let i = 0; i <= 72; i += 1) {
      const [x, y, z] = project(at((i / 36) * Math.PI));
      if (z >= 0 === front) { d += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`; pen = true; } else pen = false;
    }
    if (d) element("path", { d, fill: "none", stroke: css("--sphere-edge"), "stroke-width": 1, opacity: front ? 0.75 : 0.28 }, parent);
  }
}

function paint(svg, paths, until) {
  svg.replaceChildren();
  const shade = element("radialGradient", { id: "ball-shade", cx: "38%", cy: "32%", r: "75%" }, element("defs", {}, svg));
  element("stop", { offset: "0%", "stop-color": css("--sphere-lit") }, shade);
  element("stop", { offset: "100%", "stop-color": css("--sphere") }, shade);
  const [cx, cy] = project([0, 0, 0]);
  element("circle", { cx, cy, r: 258 * view.zoom, fill: "url(#ball-shade)", stroke: css("--sphere-edge"), "stroke-width": 1.5 }, svg);
  const grid = element("g", {}, svg);
  for (const latitude of [-60, -30, 0, 30, 60]) {
    const r = Math.cos((latitude * Math.PI) / 180), h = Math.sin((latitude * Math.PI) / 180);
    circle(grid, (t) => [r * Math.cos(t), r * Math.sin(t), h]);
  }
  for (let k = 0; k < 6; k += 1) {
    const a = (k * Math.PI) / 6;
    circle(grid, (t) => [Math.cos(t) * Math.cos(a), Math.cos(t) * Math.sin(a), Math.sin(t)]);
  }
  const pieces = [];
  for (const path of paths) {
    const own = path.xyz.filter((_, i) => path.steps[i] <= until).map(project);
    if (!own.length) continue;
    for (let i = 0; i + 1 < own.length; i += CHUNK) {
      const part = own.slice(i, i + CHUNK + 1), z = part[Math.floor(part.length / 2)][2];
      pieces.push({ z, draw: () => element("path", { d: trace(part), fill: "none", stroke: mixed(path.colour, css("--sphere"), (z >= 0 ? 1 : 0.4) * (0.55 + (0.45 * i) / own.length)), "stroke-width": z >= 0 ? 3 : 2, "stroke-linecap": "round",
                                                     "stroke-linejoin": "round", class: "way" }, svg) });
    }
    const [sx, sy, sz] = own[0], [ex, ey, ez] = own.at(-1);
    pieces.push({ z: sz + 1e-3, draw: () => element("circle", { cx: sx, cy: sy, r: 7, fill: css("--card"), stroke: path.colour, "stroke-width": 3, class: "start" }, svg) });
    pieces.push({ z: ez + 2e-3, draw: () => element("circle", { cx: ex, cy: ey, r: 7, fill: path.colour, stroke: css("--card"), "stroke-width": 2, class: "end" }, svg) });
  }
  pieces.sort((one, two) => one.z - two.z).forEach(({ draw }) => draw());
}

const degrees = (angle) => `${short((angle * 180) / Math.PI)}°`;

drawings.sphere = (figure, { "sphere-row": chosen, "sphere-step": until }) => {
  const place = figure.querySelector(".plot"), sphere = data.spheres[Number(chosen)];
  const paths = sphere.paths.filter(({ run }) => state.runs[run]).map(({ run, steps, points: at, turned, travelled }) => {
    const flat = numbers(at, 3 * steps.length);
    return { run, steps, turned, travelled, colour: runColour(run), xyz: steps.map((_, i) => [flat[3 * i], flat[3 * i + 1], flat[3 * i + 2]]) };
  });
  place.style.minHeight = "";
  figure.stale = false;
  figure.dataset.drawn = "yes";
  if (!paths.length) { place.replaceChildren(); return note(figure, "None of the chosen runs followed this row."); }
  if (view.key !== chosen) { view.key = chosen; face(paths); }
  let svg = place.querySelector("svg");
  if (!svg) {
    const ball = document.createElement("div"), facts = document.createElement("div"), tools = document.createElement("div");
    ball.className = "ball"; facts.className = "facts"; tools.className = "tools";
    svg = element("svg", { viewBox: "0 0 600 600", tabindex: 0, role: "img", "aria-label": "Unit sphere with the row's path; arrow keys turn it, plus and minus zoom" });
    const side = document.createElement("div");
    side.append(facts, tools);
    ball.append(svg, side);
    place.replaceChildren(ball);
    for (const [text, act] of [["▶ Play", () => play(figure)], ["+", () => zoom(1.25)], ["−", () => zoom(0.8)], ["Face the path", () => { view.key = ""; redraw(figure); }]]) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = text; button.addEventListener("click", act);
      if (text.length === 1) button.setAttribute("aria-label", text === "+" ? "Zoom in" : "Zoom out");
      tools.append(button);
    }
    const zoom = (factor) => { view.zoom = Math.min(Math.max(view.zoom * factor, 0.6), 12); svg.repaint(); };
    let from = null;
    svg.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointerup", () => { from = null; });
    svg.addEventListener("pointermove", (event) => {
      if (!from) return;
      const reach = svg.clientWidth * 0.43 * view.zoom;
      rotated((event.clientY - from[1]) / reach, (event.clientX - from[0]) / reach);
      from = [event.clientX, event.clientY];
      svg.repaint();
    });
    svg.addEventListener("keydown", (event) => {
      const turn = { ArrowLeft: [0, -0.1], ArrowRight: [0, 0.1], ArrowUp: [-0.1, 0], ArrowDown: [0.1, 0] }[event.key];
      if (turn) rotated(...turn);
      else if (event.key === "+" || event.key === "-") return zoom(event.key === "+" ? 1.25 : 0.8);
      else return undefined;
      event.preventDefault();
      return svg.repaint();
    });
  }
  svg.repaint = () => paint(svg, paths, until);
  svg.repaint();
  const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;
  place.querySelector(".facts").innerHTML =
    `<p><b>${escapeHtml(sphere.group)}</b>, row ${sphere.row}: a point on the unit sphere in ${sphere.size} dimensions.</p>` +
    `<p>The three directions drawn hold <b>${percent(sphere.kept)}</b> of its squared length and <b>${percent(sphere.moved)}</b> of its motion.</p>` +
    `<p>${paths.map((path) => `<b style="color:${path.colour}">${escapeHtml(data.runs[path.run].name)}</b> ended <b>${degrees(path.turned)}</b> from its start, after a way of at least ${degrees(path.travelled)}.`).join("<br>")}</p>`;
  legend(figure, [...runKeys(paths.map(({ run }) => run)).map((key) => ({ ...key, kind: "" })), { text: "ring: start, dot: end", colour: "transparent" }]);
};

function play(figure) {
  const slider = figure.querySelector('[data-control="sphere-step"]'), last = Number(slider.max), began = performance.now();
  const advance = (now) => {
    const share = Math.min((now - began) / 4000, 1);
    slider.value = Math.round(share * last);
    slider.dispatchEvent(new Event("input"));
    if (share < 1) requestAnimationFrame(advance);
  };
  requestAnimationFrame(advance);
}
