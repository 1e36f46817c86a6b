// The details of what is chosen, and the memory.

const details = document.getElementById("details"), memory_at = document.getElementById("memory");
const MEANINGS = plan.meanings;

const row = (name, ...values) => element("tr", {}, element("th", { scope: "row" }, name), ...values.map((v) => element("td", {}, v)));
const heading = (text) => element("h3", {}, text);

function tag(kind) {
  const picture = element("svg", { width: 18, height: 18, viewBox: "-1 -1 18 18", "aria-hidden": "true" }, sign(kind));
  return element("span", { class: "tag" }, picture, MEANINGS[kind]);
}

function sent_table(sent) {
  const table = element("table", { class: "sent" });
  for (const way of ["forward", "backward"])
    for (const [kind, t] of Object.entries(sent[way])) table.append(row(`${way}, ${kind}`, messages(t), bytes(t.bytes)));
  return table.children.length ? [heading("Sent in a step"), table] : [];
}

function links(title, names) {
  if (!names.length) return [];
  const buttons = names.slice(0, 24).map((name) => {
    const button = element("button", {}, name);
    button.addEventListener("click", () => find(boxes.get("n:" + name)));
    return button;
  });
  const more = names.length > 24 ? [element("span", {}, `and ${names.length - 24} more`)] : [];
  return [heading(title), element("div", { class: "links" }, ...buttons, ...more)];
}

function node_details(box) {
  const node = box.about, state = node.inputs.map((n) => nodes_by_name.get(n)).filter((n) => n?.is_state);
  const table = element("table", {}, row("value", tag(node.kind)));
  const rows = { "global shape": sizes(node.shape), "shape here": sizes(node.local_shape), type: node.dtype, layout: node.layout, operator: node.op };
  for (const [name, text] of Object.entries(rows)) if (text) table.append(row(name, text));
  if (state.length) table.append(row("parameters", state.map((n) => sizes(n.local_shape)).join(", ")));
  const reason = node.reason ? [heading("Why it is gathered, or not split"), element("div", { class: "reason" }, node.reason)] : [];
  const source = node.source ? [heading("Source line"), element("pre", {}, element("code", {}, node.source.replace(/^(\S+:\d+) /, "$1\n")))] : [];
  const readers = plan.edges.filter(([a]) => a === node.name).map(([, b]) => b);
  const inputs = node.inputs.filter((n) => boxes.has("n:" + n));
  return [element("h2", {}, node.name), element("p", { class: "path" }, node.module || "the model's own forward"), table, ...reason, ...source,
    ...sent_table(node.sent), ...links("Reads", [...new Set(inputs)]), ...links("Read by", [...new Set(readers)])];
}

function call_details(box) {
  const made = result_of(box), reasons = new Map();
  for (const name of box.names) {
    const { reason } = nodes_by_name.get(name);
    if (reason) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  }
  const table = element("table", {}, row("value", tag(box.kind)), row("nodes", String(box.names.length)));
  if (made) table.append(row("global shape", sizes(made.shape)), row("shape here", sizes(made.local_shape)), row("layout", made.layout));
  const said = [...reasons].map(([reason, n]) => element("div", { class: "reason" }, `${n} x ${reason}`));
  return [element("h2", {}, box.about.path), element("p", { class: "path" }, "module, drawn as " + box.label), table,
    ...(said.length ? [heading("Gathered, or not split"), ...said] : []), ...sent_table(sent_by(box)), ...links("Nodes", box.names)];
}

function plan_details() {
  const table = element("table", {}, row("mesh", plan.mesh_shape.join(" x ")), row("rank", plan.coords.join(", ")), row("nodes", String(plan.nodes.filter((n) => !n.is_state).length)));
  const reasons = Object.entries(plan.reasons).map(([reason, n]) => element("div", { class: "reason" }, `${n} x ${reason}`));
  return [element("h2", {}, "The whole plan"), element("p", { class: "path" }, "Choose a node or a module for its details."), table,
    ...sent_table(plan.total), heading("Gathered, or not split"), ...(reasons.length ? reasons : [element("p", { class: "path" }, "Nothing.")])];
}

function show_details() {
  details.replaceChildren(...(!chosen ? plan_details() : chosen.is_call ? call_details(chosen) : node_details(chosen)));
  details.scrollTop = 0;
  draw_memory();
}

// the memory over time, with the stretch of what is chosen
const CHART = { width: 364, height: 112, top: 6, bottom: 16 };

function draw_memory(at = null) {
  if (!plan.memory) return;
  const moments = plan.memory.timeline, peak = Math.max(...moments.map((m) => m.bytes)), low = CHART.height - CHART.bottom;
  const x = (i) => (i / Math.max(1, moments.length - 1)) * CHART.width, y = (b) => low - (b / peak) * (low - CHART.top);
  const chart = element("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": `Memory over a step, at most ${binary(peak)}` });
  chart.append(element("line", { class: "axis", x1: 0, x2: CHART.width, y1: low, y2: low }));
  for (const phase of ["forward", "backward"]) {
    const points = moments.flatMap((m, i) => (m.phase === phase ? [[x(i), y(m.bytes)]] : []));
    if (!points.length) continue;
    const line = points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), first = points[0][0], last = points.at(-1)[0];
    chart.append(element("polygon", { class: `area ${phase}`, points: `${first},${low} ${line} ${last},${low}` }), element("polyline", { class: `curve ${phase}`, points: line }));
    chart.append(element("text", { x: first, y: CHART.height - 2 }, phase));
  }
  const here = chosen ? new Set(chosen.names.map((n) => nodes_by_name.get(n).module).filter(Boolean)) : new Set();
  for (const [from, to] of stretches(moments.map((m) => here.has(m.module))))
    chart.append(element("rect", { class: "here", x: x(from), width: Math.max(2, x(to) - x(from)), y: CHART.top, height: low - CHART.top }));
  if (at !== null) chart.append(element("line", { class: "at", x1: x(at), x2: x(at), y1: CHART.top, y2: low }));
  const top = moments.findIndex((m) => m.bytes === peak), said = moments[at ?? top];
  const text = `${at === null ? "peak " : ""}${binary(said.bytes)}, ${said.phase}, ${said.node}${said.module ? ", " + said.module : ""}`;
  memory_at.replaceChildren(element("h3", { style: "margin-top:0" }, "Memory of this rank in a step"), chart, element("p", { title: text }, text));
  chart.addEventListener("pointermove", (e) => draw_memory(moment_at(chart, e)), { once: true });
  chart.addEventListener("pointerleave", () => draw_memory());
  chart.addEventListener("click", (e) => find(box_of_module(moments[moment_at(chart, e)].module)));
}

// [from, to) of each run of true
function stretches(flags) {
  const found = [];
  flags.forEach((flag, i) => {
    if (flag && flags[i - 1]) found.at(-1)[1] = i + 1;
    else if (flag) found.push([i, i + 1]);
  });
  return found;
}

function moment_at(chart, event) {
  const { left, width } = chart.getBoundingClientRect(), last = plan.memory.timeline.length - 1;
  return Math.min(last, Math.max(0, Math.round(((event.clientX - left) / width) * last)));
}

function box_of_module(module) {
  const node = module && plan.nodes.find((n) => n.module === module && !n.is_state);
  return node ? boxes.get("n:" + node.name) : null;
}

function draw_legend() {
  const items = Object.keys(MEANINGS).map((kind) => element("li", {}, tag(kind)));
  items.push(element("li", {}, element("span", {}, "↓ sent in the forward   ↑ in the backward")));
  const line = element("svg", { width: 18, height: 18, "aria-hidden": "true" }, element("path", { class: "wire order", d: "M0 9H18" }));
  if (plan.order.length) items.push(element("li", {}, element("span", { class: "tag" }, line, plan.order_meaning)));
  document.getElementById("legend").replaceChildren(...items);
}
