// Where boxes are: each open call is laid out by dagre for itself, inner ones first, and is then one box of the outer one.
// A value that enters or leaves a call passes a port on its upper or lower edge; so a change inside one call
// moves what is around it, but nothing is computed again for its siblings.

const BOX = { width: 236, line: 17, pad: 11, header: 30, frame: 16, port: 10 };

function lines_of(box) {
  const sent = sent_by(box);
  return [...Object.entries(sent.forward).map(([k, t]) => ["forward", k, t]), ...Object.entries(sent.backward).map(([k, t]) => ["backward", k, t])];
}

function place_box(box) {
  if (box.is_call && box.open) return place_call(box);
  box.width = BOX.width;
  box.height = 2 * BOX.pad + BOX.line * (2 + lines_of(box).length) - 3;
  box.ins = box.outs = null;
  return box;
}

// edges by the call in which they run: between two children, from a port to a child, from a child to a port
function route_edges() {
  for (const box of [top_box, ...seen_in_order()]) box.inner = new Map();
  const add = (call, from, to, value, order) => {
    const key = `${from} ${to} ${value}`;
    call.inner.set(key, { from, to, value, order: order && (call.inner.get(key)?.order ?? true) });
  };
  for (const [source, reader] of plan.edges) {
    const a = path_to(seen(boxes.get("n:" + source))), b = path_to(seen(boxes.get("n:" + reader))), order = in_order.has(`${source},${reader}`);
    let shared = 0;
    while (shared + 1 < Math.min(a.length, b.length) && a[shared + 1] === b[shared + 1]) shared++;
    if (a[shared + 1] === undefined || b[shared + 1] === undefined) continue; // inside one closed call
    add(a[shared], a[shared + 1].id, b[shared + 1].id, source, order);
    for (let i = shared + 1; i + 1 < a.length; i++) add(a[i], a[i + 1].id, "out:" + source, source, order);
    for (let i = shared + 1; i + 1 < b.length; i++) add(b[i], "in:" + source, b[i + 1].id, source, order);
  }
}

function place_call(call) {
  call.children.forEach(place_box);
  const looks = JSON.stringify([call.children.map((c) => [c.id, c.width, c.height]), [...call.inner.keys()]]);
  if (call.looked !== looks) call.graph = laid_out(call);
  call.looked = looks;
  return take_places(call);
}

function laid_out(call) {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 26, edgesep: 14, ranksep: 30, ranker: call.children.length > 300 ? "longest-path" : "network-simplex" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const child of call.children) graph.setNode(child.id, { width: child.width, height: child.height });
  const ports = ports_of(call);
  if (ports.size) for (const end of ["first", "last"]) graph.setNode(end, { width: 1, height: 1 });
  for (const port of ports) {
    graph.setNode(port, { width: BOX.port, height: 1 });
    graph.setEdge(...(port.startsWith("in:") ? ["first", port] : [port, "last"]), { weight: 50, minlen: 1 }, "pin");
  }
  for (const e of call.inner.values()) graph.setEdge(e.from, e.to, { weight: e.order ? 0 : e.from.includes(":") ? 2 : 1 }, e.value);
  dagre.layout(graph);
  return graph;
}

function ports_of(call) {
  const ends = [...call.inner.values()].flatMap((e) => [e.from, e.to]);
  return new Set(ends.filter((id) => id.startsWith("in:") || id.startsWith("out:")));
}

function take_places(call) {
  const graph = call.graph, insets = call === top_box ? { x: 0, y: 0, b: 0 } : { x: BOX.frame, y: BOX.header, b: BOX.frame };
  const at = (id) => graph.node(id);
  const upper = Math.min(...call.children.map((c) => at(c.id).y - c.height / 2));
  const lower = Math.max(...call.children.map((c) => at(c.id).y + c.height / 2));
  const bends = [...call.inner.values()].flatMap((e) => graph.edge({ v: e.from, w: e.to, name: e.value }).points.map((p) => p.x));
  const left = Math.min(...bends, ...call.children.map((c) => at(c.id).x - c.width / 2));
  const right = Math.max(...bends, ...call.children.map((c) => at(c.id).x + c.width / 2));
  const dx = insets.x - left, dy = insets.y - upper;
  call.width = right - left + 2 * insets.x;
  call.height = lower - upper + insets.y + insets.b;
  for (const child of call.children) Object.assign(child, { x: at(child.id).x - child.width / 2 + dx, y: at(child.id).y - child.height / 2 + dy });
  place_ports(call, "ins", "in:", "from", "to", (id) => at(id).x + dx);
  place_ports(call, "outs", "out:", "to", "from", (id) => at(id).x + dx);
  call.wires = [...call.inner.values()].map((e) => wire(call, e, graph.edge({ v: e.from, w: e.to, name: e.value }).points, dx, dy));
  return call;
}

// a port is straight above its first reader, or below what makes its value, unless another is there
function place_ports(call, side, prefix, port_end, box_end, own_x) {
  const places = new Map(), taken = new Set();
  const edges = [...call.inner.values()].filter((e) => e[port_end].startsWith(prefix));
  edges.sort((a, b) => boxes.get(a[box_end]).y - boxes.get(b[box_end]).y);
  for (const e of edges) {
    if (places.has(e.value)) continue;
    const box = boxes.get(e[box_end]), x = box.x + (box[side]?.get(e.value) ?? box.width / 2);
    places.set(e.value, taken.has(x) ? own_x(e[port_end]) : x);
    taken.add(x);
  }
  call[side] = places;
}

// the points of an edge within its call, from the lower edge of what makes the value to the upper edge of what reads it
function wire(call, { from, to, value, order }, points, dx, dy) {
  const a = boxes.get(from), b = boxes.get(to);
  const start = a ? { x: a.x + (a.outs?.get(value) ?? a.width / 2), y: a.y + a.height } : { x: call.ins.get(value), y: 0 };
  const end = b ? { x: b.x + (b.ins?.get(value) ?? b.width / 2), y: b.y } : { x: call.outs.get(value), y: call.height };
  const inner = points.length > 3 ? points.slice(1, -1) : []; // between neighbours dagre bends once, at the boxes' centres
  const upper = a ? start.y : BOX.header - 4, lower = b ? end.y : call.height - BOX.frame + 2;
  const middle = inner.map((p) => ({ x: p.x + dx, y: p.y + dy })).filter((p) => p.y > upper && p.y < lower);
  const after = middle[0] ?? end, before = middle.at(-1) ?? start; // sideways where no box is: under the title, in the lower frame
  if (!a && after !== end) middle.unshift({ x: after.x, y: upper });
  if (!b && before !== start) middle.push({ x: before.x, y: lower });
  return { points: [start, ...middle, end], tip: !!b && !(b.is_call && b.open), from, to, value, order };
}

function place_all() {
  route_edges();
  place_call(top_box);
  top_box.x = top_box.y = 0;
}
