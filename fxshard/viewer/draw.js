// Draws what place.js has placed, and moves the view.

const SVG = "http://www.w3.org/2000/svg";
const canvas = document.getElementById("canvas"), picture = document.getElementById("picture"), view = document.getElementById("view");
const SIGNS = {
  split: "M3 3H5V13H3ZM7 3H9V13H7ZM11 3H13V13H11Z",
  whole: "M3 3H13V13H3Z",
  gathered: "M2 8L6 4V7H7V9H6V12ZM14 8L10 4V7H9V9H10V12Z",
  communication: "M2 6L5 3V5H14V7H5V9ZM14 10L11 7V9H2V11H11V13Z",
  other: "M6 8A2 2 0 0 1 10 8A2 2 0 0 1 6 8Z",
};
let chosen = null, camera = { x: 0, y: 0, zoom: 1 };

function element(tag, attributes = {}, ...inside) {
  const made = tag in { svg: 1, g: 1, rect: 1, path: 1, text: 1, tspan: 1, polyline: 1, polygon: 1, line: 1, title: 1 } ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...inside.filter((x) => x !== null && x !== undefined));
  return made;
}

const sign = (kind, x = 0, y = 0) =>
  element("g", { class: `sign ${kind}`, transform: `translate(${x} ${y})` }, element("path", { d: SIGNS[kind] }), element("rect", { width: 16, height: 16, rx: 3 }));

const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const short_op = (node) => (node.op.includes(".") ? node.op.split(".")[1] : "");
const messages = (t) => (t.messages ? `${t.messages} msg` : "in a bucket");

function spoken(box) {
  const node = result_of(box), sent = lines_of(box).map(([way, kind, t]) => `${way} ${kind} ${messages(t)} ${bytes(t.bytes)}`);
  const what = box.is_call ? `module ${box.label}, ${box.names.length} nodes` : `${box.label}, ${box.about.op}`;
  return [what, box.kind, node ? sizes(node.shape ?? node.local_shape) : "", ...sent].filter(Boolean).join(", ");
}

function draw() {
  place_all();
  view.replaceChildren();
  draw_inside(top_box, 0, 0, view);
  mark();
  document.getElementById("status").textContent = `${leaves_seen()} boxes of ${plan.nodes.filter((n) => !n.is_state).length} nodes`;
}

function draw_inside(call, x, y, into) {
  for (const child of call.children) {
    const left = x + child.x, top = y + child.y;
    into.append(child.is_call && child.open ? draw_frame(child, left, top) : draw_box(child, left, top));
  }
  for (const w of call.wires) draw_wire(w, x, y, into);
  for (const child of call.children.filter((c) => c.is_call && c.open)) {
    const left = x + child.x, top = y + child.y;
    draw_inside(child, left, top, into);
    into.append(element("text", { x: left + 13, y: top + 20, class: "label over", "aria-hidden": "true" }, "▾ " + cut(child.label, 34)));
  }
}

function draw_wire(w, x, y, into) {
  const points = w.points.map((p) => ({ x: p.x + x, y: p.y + y }));
  const [first, last] = [points[0], points.at(-1)];
  let d = `M${first.x} ${first.y}`;
  for (let i = 0; i + 1 < points.length; i++) {
    const a = points[i], b = points[i + 1], half = (a.y + b.y) / 2;
    d += `C${a.x} ${half} ${b.x} ${half} ${b.x} ${b.y}`;
  }
  into.append(element("path", { class: w.order ? "wire order" : "wire", d, "data-value": w.value, "data-to": w.to }));
  if (w.tip) into.append(element("path", { class: "tip", d: "M0 0L-4 -7H4Z", transform: `translate(${last.x} ${last.y})` }));
}

function item(box, x, y, name) {
  const state = box.is_call ? { "aria-expanded": box.open } : {};
  const about = { id: "box " + box.id, role: "treeitem", "aria-level": box.depth, "aria-label": spoken(box), "data-id": box.id, ...state };
  Object.assign(box, { left: x, top: y });
  return element("g", { class: name, transform: `translate(${x} ${y})`, ...about }, element("title", {}, box.is_call ? box.about.path : box.about.op));
}

function draw_frame(box, x, y) {
  const group = item(box, x, y, `module ${box.depth % 2 ? "" : "odd"}`);
  group.append(element("rect", { width: box.width, height: box.height, rx: 12 }));
  return group;
}

function draw_box(box, x, y) {
  const group = item(box, x, y, `box ${box.kind}`), node = result_of(box);
  if (box.is_call) group.append(element("rect", { x: 4, y: 4, width: box.width, height: box.height, rx: 9 }));
  group.append(element("rect", { width: box.width, height: box.height, rx: 9 }), sign(box.kind, 11, 10));
  const note = box.is_call ? `${box.names.length} nodes` : short_op(box.about) === box.label ? "" : short_op(box.about);
  const label = cut((box.is_call ? "▸ " : "") + box.label, 24);
  const text = element("text", { x: 36, y: 23, class: "label" }, label);
  if (note) text.append(element("tspan", { class: "quiet", dx: 7 }, cut(note, 29 - label.length)));
  group.append(text);
  if (node) {
    const whole = sizes(node.shape ?? node.local_shape), here = sizes(node.local_shape);
    group.append(element("text", { x: 36, y: 40, class: "quiet" }, here && here !== whole ? `${whole}, here ${here}` : whole));
  }
  lines_of(box).forEach(([way, kind, t], i) => group.append(sent_line(way, kind, t, 57 + i * BOX.line)));
  return group;
}

function sent_line(way, kind, t, y) {
  const arrow = way === "forward" ? "↓" : "↑";
  return element("text", { x: 15, y, class: "sent" }, arrow, element("tspan", { x: 36 }, kind), element("tspan", { class: "quiet", dx: 6 }, `${messages(t)}, ${bytes(t.bytes)}`));
}

function mark() {
  view.querySelectorAll(".chosen, .near").forEach((e) => e.classList.remove("chosen", "near"));
  view.querySelectorAll("[aria-selected]").forEach((e) => e.removeAttribute("aria-selected"));
  canvas.removeAttribute("aria-activedescendant");
  if (!chosen) return;
  const group = document.getElementById("box " + chosen.id), inside = new Set(chosen.names);
  group.classList.add("chosen");
  group.setAttribute("aria-selected", "true");
  canvas.setAttribute("aria-activedescendant", group.id);
  const read = new Set(plan.edges.filter(([, b]) => inside.has(b)).map(([a]) => a));
  for (const w of view.querySelectorAll(".wire")) {
    const to = boxes.get(w.dataset.to), ends_here = to && (to === chosen || path_to(chosen).includes(to) || path_to(to).includes(chosen));
    if (inside.has(w.dataset.value) || (read.has(w.dataset.value) && (ends_here || !to))) w.classList.add("near");
  }
}

// the view
function move_to(next) {
  camera = { ...next, zoom: Math.min(3, Math.max(0.03, next.zoom)) };
  view.setAttribute("transform", `translate(${camera.x} ${camera.y}) scale(${camera.zoom})`);
}

function zoom_at(factor, x, y) {
  const zoom = Math.min(3, Math.max(0.03, camera.zoom * factor)), by = zoom / camera.zoom;
  move_to({ x: x - (x - camera.x) * by, y: y - (y - camera.y) * by, zoom });
}

function fit(least = 0) {
  const { width, height } = canvas.getBoundingClientRect(), edge = 28;
  const zoom = Math.max(least, Math.min(1.15, (width - 2 * edge) / top_box.width, (height - 2 * edge) / top_box.height));
  move_to({ x: (width - top_box.width * zoom) / 2, y: Math.max(edge, (height - top_box.height * zoom) / 2), zoom });
}

// the box comes into view; it is moved no more than needed
function show(box, centred = false) {
  const { width, height } = canvas.getBoundingClientRect(), edge = 70;
  const zoom = Math.max(camera.zoom, centred ? 0.7 : 0);
  if (zoom !== camera.zoom) zoom_at(zoom / camera.zoom, width / 2, height / 2);
  const x = box.left * zoom + camera.x, y = box.top * zoom + camera.y, w = box.width * zoom, h = Math.min(box.height * zoom, height / 2);
  const to = (at, size, room) => (centred ? (room - size) / 2 : Math.max(edge, Math.min(at, room - size - edge)));
  move_to({ x: camera.x + to(x, w, width) - x, y: camera.y + to(y, h, height) - y, zoom });
}

// open or close, with the box staying where it is on the screen
function toggle(box) {
  if (!box.is_call) return;
  const x = box.left * camera.zoom + camera.x, y = box.top * camera.zoom + camera.y;
  box.open = !box.open;
  draw();
  move_to({ ...camera, x: x - box.left * camera.zoom, y: y - box.top * camera.zoom });
}
